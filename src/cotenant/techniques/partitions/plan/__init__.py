"""Plans: which tenant gets which partition of which device, in what batches; planners, and an independent checker."""
