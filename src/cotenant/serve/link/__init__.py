"""Links between a server's processes: messages over a Unix socket, tensors in shared memory."""
