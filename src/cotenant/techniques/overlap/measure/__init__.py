"""Measuring groups."""
