"""Policies that follow joint schedules. Pure."""
