"""How the processes of a server hand queries to each other: messages over a socket, tensors in shared memory."""
