"""A process for each tenant: the executor in the server, what keeps the processes alive, and their own program."""
