"""Rounds of planned batches (GPU-let, ATC'22): the run-time side of a plan."""
