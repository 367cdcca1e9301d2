"""GPU-let: spatial partitions, batches and rounds. See README.md."""
