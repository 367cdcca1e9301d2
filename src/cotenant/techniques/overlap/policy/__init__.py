"""Deterministic operator overlap (Abacus, SC'21): groups of segments that start together."""
