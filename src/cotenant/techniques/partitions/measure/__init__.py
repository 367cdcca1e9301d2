"""Measurement of interference between partitions."""
