"""Drain: waits until the gateway has no outstanding query for models that leave their nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from cotenant.cluster.types import ClusterError, GatewayReport

_POLL_S = 0.02


def drained(
    report: Callable[[], GatewayReport],
    pairs: Sequence[tuple[str, str]],
    version: int,
    members: Collection[str],
    go_on: Callable[[], bool],
) -> list[tuple[str, str]]:
    """Wait for (node, model) pairs to have no queries; returns the pairs that still have some when `go_on` is False.

    A gateway that does not answer, or uses a table older than `version`, may still send queries to all pairs. Without a
    gateway there are no queries: the next gateway starts with the new table.
    """
    left = list(pairs)
    while left and go_on():
        try:
            found = report()
        except TimeoutError:
            continue
        except ClusterError:
            return []
        behind = found.version < version
        left = [(node, model) for node, model in left if node in members]
        left = [pair for pair in left if behind or found.outstanding.get(pair, 0)]
        if left:
            time.sleep(_POLL_S)
    return left
