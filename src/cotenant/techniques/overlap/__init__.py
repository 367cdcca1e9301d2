"""Abacus: groups of operators of several models that start and end together. See README.md."""
