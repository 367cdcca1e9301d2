"""The executor on threads of this process."""
