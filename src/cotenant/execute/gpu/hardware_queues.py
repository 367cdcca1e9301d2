"""The queues through which a process hands work to a GPU: streams that share one wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST = 32
_USUAL = 8


def use_all_queues(environment: MutableMapping[str, str]) -> None:
    """Have as many queues as there can be, unless the user has set their number. Before CUDA starts, which reads it."""
    environment.setdefault(VARIABLE, str(MOST))


def queue_count(environment: Mapping[str, str]) -> int:
    """How many queues CUDA makes in such an environment."""
    text = environment.get(VARIABLE, "")
    return min(MOST, int(text)) if text.isdecimal() and int(text) else _USUAL
