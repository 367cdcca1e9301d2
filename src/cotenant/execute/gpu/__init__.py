"""GPUs as executors see them: streams, shares by green contexts, recorded graphs, resident weights."""
