"""Notices when a tenant begins to miss its SLO, and when it meets it again, and says so in the log."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from cotenant.config import NS_PER_MS
from cotenant.serve.engine.clock import Clock
from cotenant.trace.lost import CAUSE_NAMES
from cotenant.types import LossCause, Tenant

_log = logging.getLogger("cotenant.slo")
_server_log = logging.getLogger("cotenant.server")

_WINDOW = 100
"""Queries that are looked at together: as many as tell 95 from 99 %."""
_BEGINS_ABOVE, _ENDS_BELOW = 5, 2
"""Misses in the window. Far apart, so that who is at the border is told of once."""
_APART_NS = 10_000 * NS_PER_MS
"""At least so long between two turns of a tenant: a log is read by people."""
_LOG_PRIORITY = 9


@dataclass(frozen=True, slots=True)
class Turn:
    """A tenant begins, or ceases, to miss its SLO: how many did of the last queries, and since the turn before."""

    begins: bool
    missed: int
    window: int
    missed_since: int
    since_ns: int


@dataclass(slots=True)
class SloWatch:
    """Of one tenant: it misses its SLO from more than 5 misses in its last 100 queries on, until fewer than 2."""

    is_missing: bool = False
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _missed: int = 0
    _missed_since: int = 0
    _turned_ns: int | None = None

    def ended(self, in_time: bool, now_ns: int) -> Turn | None:
        """A query has ended, in time or not. Gives what is new with it."""
        recent = self._recent
        if len(recent) == _WINDOW and not recent[0]:
            self._missed -= 1
        recent.append(in_time)
        if not in_time:
            self._missed += 1
            self._missed_since += 1
        elif not self.is_missing:
            return None
        is_turn = (
            self._missed < _ENDS_BELOW and len(recent) == _WINDOW if self.is_missing else self._missed > _BEGINS_ABOVE
        )
        if not is_turn or (self._turned_ns is not None and now_ns - self._turned_ns < _APART_NS):
            return None
        since_ns = 0 if self._turned_ns is None else now_ns - self._turned_ns
        turn = Turn(not self.is_missing, self._missed, len(recent), self._missed_since, since_ns)
        self.is_missing, self._missed_since, self._turned_ns = turn.begins, 0, now_ns
        return turn


def turn_text(tenant: str, slo_ns: int, turn: Turn, cause: str = "") -> str:
    """The line of the log. `cause` is what most of the late losses are due to, where that is known."""
    whom = f"tenant {tenant!r}"
    slo = f"its SLO of {slo_ns / NS_PER_MS:g} ms"
    why = f" (main cause: {CAUSE_NAMES[LossCause(cause)]})" if cause else ""
    if turn.begins:
        return f"{whom} begins to miss {slo}: {turn.missed} of its last {turn.window} queries{why}"
    return f"{whom} meets {slo} again: {turn.missed_since} queries missed it in {turn.since_ns / 1e9:.1f} s{why}"


def log_served(model: str, tenant: Tenant, alone_ns: int) -> None:
    """Say that a model is served, and warn where its predicted latency alone is above the SLO."""
    slo_ms = tenant.slo_ns / NS_PER_MS
    if alone_ns > tenant.slo_ns:
        _server_log.warning(
            "model %r takes %.1f ms alone and cannot meet its SLO of %g ms: its queries will be refused, but for a "
            "probe now and then that shows whether this still holds",
            *(model, alone_ns / NS_PER_MS, slo_ms),
        )
    _server_log.info("model %r is served: slo %g ms, %d segments", model, slo_ms, len(tenant.cuts) - 1)


def log_turns(clock: Clock, tenant: str, slo_ns: int, turn: Turn, cause: str) -> None:
    """Write the line, off the way of queries: on the clock's thread."""
    level = logging.WARNING if turn.begins else logging.INFO
    write = partial(_log.log, level, "%s", turn_text(tenant, slo_ns, turn, cause))
    clock.call_at(clock.now_ns(), _LOG_PRIORITY, write)
