"""GPU-let (ATC 2022): partitions of a GPU, shared in time as well."""
