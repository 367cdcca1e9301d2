"""Interference model: slowdown of launches beside co-runners (GPU-let, ATC'22, section 4.4)."""
