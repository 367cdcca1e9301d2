"""Detection of tenants that begin or cease to miss their SLO, with hysteresis, and the log lines for it."""

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
"""Queries in the sliding window: enough to distinguish 95 % from 99 % attainment."""
_BEGINS_ABOVE, _ENDS_BELOW = 5, 2
"""Thresholds of misses in the window. Their gap is a hysteresis against repeated log lines."""
_LEAST_INTERVAL_NS = 10_000 * NS_PER_MS
"""Least time in ns between two changes of a tenant, so that the log stays readable."""
_LOG_PRIORITY = 9


@dataclass(frozen=True, slots=True)
class SloChange:
    """A tenant begins (`begins`) or ceases to miss its SLO. `missed` of the last `window` queries missed it, and
    `missed_since` in the `since_ns` since the previous change."""

    begins: bool
    missed: int
    window: int
    missed_since: int
    since_ns: int


@dataclass(slots=True)
class SloWatch:
    """SLO state of one tenant: missing above 5 misses in the last 100 queries, meeting again below 2."""

    is_missing: bool = False
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _missed: int = 0
    _missed_since: int = 0
    _changed_ns: int | None = None

    def ended(self, in_time: bool, now_ns: int) -> SloChange | None:
        """Record the end of a query. Returns the change that it causes, if any."""
        recent = self._recent
        if len(recent) == _WINDOW and not recent[0]:
            self._missed -= 1
        recent.append(in_time)
        if not in_time:
            self._missed += 1
            self._missed_since += 1
        elif not self.is_missing:
            return None
        is_change = (
            self._missed < _ENDS_BELOW and len(recent) == _WINDOW if self.is_missing else self._missed > _BEGINS_ABOVE
        )
        if not is_change or (self._changed_ns is not None and now_ns - self._changed_ns < _LEAST_INTERVAL_NS):
            return None
        since_ns = 0 if self._changed_ns is None else now_ns - self._changed_ns
        change = SloChange(not self.is_missing, self._missed, len(recent), self._missed_since, since_ns)
        self.is_missing, self._missed_since, self._changed_ns = change.begins, 0, now_ns
        return change


def slo_change_text(tenant: str, slo_ns: int, change: SloChange, cause: str = "") -> str:
    """Text of the log line. `cause`: main cause of the recent losses, if known."""
    subject = f"tenant {tenant!r}"
    slo = f"its SLO of {slo_ns / NS_PER_MS:g} ms"
    why = f" (main cause: {CAUSE_NAMES[LossCause(cause)]})" if cause else ""
    if change.begins:
        return f"{subject} begins to miss {slo}: {change.missed} of its last {change.window} queries{why}"
    return f"{subject} meets {slo} again: {change.missed_since} queries missed it in {change.since_ns / 1e9:.1f} s{why}"


def log_served(model: str, tenant: Tenant, alone_ns: int) -> None:
    """Log that a model is served, and warn if its predicted solo latency exceeds the SLO."""
    slo_ms = tenant.slo_ns / NS_PER_MS
    if alone_ns > tenant.slo_ns:
        _server_log.warning(
            "model %r takes %.1f ms alone and cannot meet its SLO of %g ms: its queries are rejected, except "
            "occasional probes that measure it again; raise tenant.slo_ms or use a faster model",
            *(model, alone_ns / NS_PER_MS, slo_ms),
        )
    _server_log.info("model %r is served: slo %g ms, %d segments", model, slo_ms, len(tenant.cuts) - 1)


def log_slo_change(clock: Clock, tenant: str, slo_ns: int, change: SloChange, cause: str) -> None:
    """Write the log line on the clock's thread, off the critical path of queries."""
    level = logging.WARNING if change.begins else logging.INFO
    write = partial(_log.log, level, "%s", slo_change_text(tenant, slo_ns, change, cause))
    clock.call_at(clock.now_ns(), _LOG_PRIORITY, write)
