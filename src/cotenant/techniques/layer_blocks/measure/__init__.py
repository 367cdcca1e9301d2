"""Measurement of compiled kernel versions."""
