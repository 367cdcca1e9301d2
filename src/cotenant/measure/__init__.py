"""Measurement campaigns that make profiles: models alone, groups, co-runs, and memory bandwidth."""
