"""VELTAIR (ASPLOS 2022): layer blocks, and several compiled versions of every layer."""
