"""Probes: queries that run although their model is predicted to exceed its SLO, to check the prediction.

All queries of such a model are refused, so nothing is observed and a wrong profile would never be corrected. From time
to time the engine admits one of these queries as a probe, alone and after all urgent work.

Probes of a tenant take at most 1/FASTER of a lane's time while they end within the SLO, that is while the profile is
wrong. Else they take at most 1/SLOWER, halved after each further probe, down to one probe in MOST_NS.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from cotenant.core.actions import Launch
from cotenant.types import Query

FASTER, SLOWER = 10, 200
LEAST_NS, MOST_NS = 10_000_000, 600_000_000_000
"""Bounds of the time between two probes, which is FASTER or SLOWER times a probe's run."""
FAILED_NS = 1_000_000_000
"""Shortest time between a failed probe and the next one."""
_ROOM = 8
"""Deadline of a probe in predicted latencies: late, so that urgent queries go first."""
_MOST_MISSES = 20


@dataclass(slots=True)
class _Tenant:
    """The current or last probe of a tenant; `next_ns` is the earliest time of the next one."""

    query: int
    slo_ns: int = 0
    needed_ns: int = 0
    next_ns: int = 0
    misses: int = 0


class Probes:
    """Schedule of probes by tenant. `inside` has the probes that have not run yet, by the number of the query."""

    __slots__ = ("_known", "inside")

    def __init__(self) -> None:
        self._known: dict[str, _Tenant] = {}
        self.inside: dict[int, _Tenant] = {}

    def admit(self, query: Query, needed_ns: int, slo_ns: int, merge_key: int, now_ns: int) -> Query | None:
        """The query as a probe, unmerged and with a late deadline; None if its tenant may not have one now.

        The query is predicted to take `needed_ns`, more than the tenant's SLO. Its own deadline becomes its time-out.
        """
        known = self._known.get(query.tenant)
        if known is None:
            known = self._known[query.tenant] = _Tenant(query.id)
        elif now_ns < known.next_ns:
            return None
        self.inside.pop(known.query, None)
        deadline_ns = max(query.deadline_ns, now_ns + _ROOM * needed_ns)
        known.query, known.slo_ns, known.needed_ns = query.id, slo_ns, needed_ns
        known.next_ns = min(deadline_ns, now_ns + MOST_NS)
        self.inside[query.id] = known
        expiry_ns = query.deadline_ns if query.expiry_ns is None else min(query.expiry_ns, query.deadline_ns)
        return structs.replace(query, deadline_ns=deadline_ns, expiry_ns=expiry_ns, merge_key=merge_key)

    def ended(self, launch: Launch, ran_ns: int, now_ns: int, *, has_failed: bool) -> None:
        """Update the schedule if the ended launch, which ran `ran_ns`, is the first one of a probe."""
        if (known := self.inside.get(launch.queries[0])) is not None:
            took_ns = known.needed_ns * ran_ns // max(1, launch.predicted_ns)  # of the whole model
            self.took(launch.queries[0], took_ns, now_ns, has_failed=has_failed)

    def took(self, query: int, took_ns: int, now_ns: int, *, has_failed: bool) -> None:
        """Update the schedule if the query is a probe: it took so long, or failed after that time."""
        known = self.inside.pop(query, None)
        if known is None:
            return
        is_faster = not has_failed and took_ns <= known.slo_ns
        known.misses = 0 if is_faster else min(_MOST_MISSES, known.misses + 1)
        wait_ns = took_ns * (FASTER if is_faster else SLOWER << known.misses - 1)
        known.next_ns = now_ns + min(MOST_NS, max(LEAST_NS, FAILED_NS if has_failed else 0, wait_ns))

    def forget(self, tenant: str) -> None:
        """Remove the state of a tenant that was removed or replaced."""
        known = self._known.pop(tenant, None)
        if known is not None:
            self.inside.pop(known.query, None)
