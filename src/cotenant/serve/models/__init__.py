"""Served models and applications, their names, and the loading of models."""
