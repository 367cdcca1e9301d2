"""Executors on GPUs: streams, shares by green contexts, captured graphs, resident weights."""
