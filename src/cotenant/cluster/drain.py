"""Waits until the gateway has no query under way for models that leave their nodes."""

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
    """The pairs of node and model that still have queries once `go_on` says no; usually none.

    A gateway that does not answer, or that sends by a table before `version`, may still send queries to all of them.
    Where there is no gateway there are none: the next one begins with the new table.
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
