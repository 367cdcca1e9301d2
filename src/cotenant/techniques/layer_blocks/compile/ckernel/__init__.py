"""Kernels written in C: their text, and the compiler that turns it into libraries."""
