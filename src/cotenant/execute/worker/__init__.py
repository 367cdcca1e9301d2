"""Worker processes, one for each tenant: the executor in the server, their supervisors, and their program."""
