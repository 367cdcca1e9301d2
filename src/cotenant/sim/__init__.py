"""The simulator: the same core and policies in a virtual time."""
