"""Executors: what runs a launch and tells its end."""
