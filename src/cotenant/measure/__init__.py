"""Campaigns that make profiles: models alone, groups, co-runs, and what they draw from the memory."""
