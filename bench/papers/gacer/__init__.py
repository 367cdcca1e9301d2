"""GACER (2023): operator granularity of models that run together, on GPUs by roofline and on measured kernels."""
