"""Hardware queues from a process to a GPU: streams that share a queue wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST = 32
_USUAL = 8


def use_all_queues(environment: MutableMapping[str, str]) -> None:
    """Use the maximum number of queues unless the user has set it. Call it before CUDA starts, which reads it."""
    environment.setdefault(VARIABLE, str(MOST))


def queue_count(environment: Mapping[str, str]) -> int:
    """Number of queues that CUDA makes with this environment."""
    text = environment.get(VARIABLE, "")
    return min(MOST, int(text)) if text.isdecimal() and int(text) else _USUAL
