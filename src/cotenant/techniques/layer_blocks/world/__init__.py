"""Worlds in which cores share a memory."""
