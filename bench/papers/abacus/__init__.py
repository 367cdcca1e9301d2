"""Abacus (SC 2021): deterministic operator overlap."""
