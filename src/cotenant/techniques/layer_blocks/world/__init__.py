"""Simulated worlds of cores that share a memory."""
