"""GPUs as executors see them: streams, shares by green contexts or MPS, recorded graphs, resident weights."""
