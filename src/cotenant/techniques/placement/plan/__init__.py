"""Placement: which device runs each task of one model's graph, in which order, so that devices work at once."""
