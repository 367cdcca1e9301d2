"""Policies that give every block of units its own cores and version, on any number of cores: docs/layer_blocks.md."""
