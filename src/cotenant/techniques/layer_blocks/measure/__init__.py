"""Measuring compiled versions of layers."""
