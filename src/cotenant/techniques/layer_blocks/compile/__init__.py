"""Versions of layers: what a layer asks for, kernels in C for it, the search over them, and which are kept."""
