"""Policies that start the first of a list: by arrival, by length, by deadline."""
