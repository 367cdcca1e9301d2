"""VELTAIR: layer blocks, and layers in several compiled versions. See README.md."""
