"""Executors: run launches and report their ends."""
