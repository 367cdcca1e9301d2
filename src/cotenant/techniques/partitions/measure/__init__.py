"""Measuring how partitions disturb each other."""
