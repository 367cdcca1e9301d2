"""Measuring tasks on devices."""
