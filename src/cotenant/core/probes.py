"""Probes: queries that run although their model is believed to take longer than its SLO, to find out whether it does.

Such a model has all its queries refused. Nothing of it runs, so nothing is observed, and a wrong profile would be
believed for ever. Now and then the engine admits one of these queries as a probe, alone and behind all that is urgent.

Bounds, of a lane, for each tenant: probes take at most 1/FASTER of the time while they run for less than the SLO, which
shows that the belief is wrong. Else they take at most 1/SLOWER, half of that after each further probe in vain, down to
one in MOST_NS.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from cotenant.core.actions import Launch
from cotenant.types import Query

FASTER, SLOWER = 10, 200
LEAST_NS, MOST_NS = 10_000_000, 600_000_000_000
"""Shortest and longest time from one probe to the next: between are as many times of its run as FASTER or SLOWER."""
FAILED_NS = 1_000_000_000
"""Shortest time after a probe that has failed."""
_ROOM = 8
"""Deadline of a probe, in predicted latencies: so late that it stands behind all that is urgent."""
_MOST_MISSES = 20


@dataclass(slots=True)
class _Tenant:
    """The probe of a tenant that is inside, or the last one; `next_ns` is when another may come."""

    query: int
    slo_ns: int = 0
    needed_ns: int = 0
    next_ns: int = 0
    misses: int = 0


class Probes:
    """When which tenant may have a probe. `inside` has those that have not run so far, by the number of the query."""

    __slots__ = ("_known", "inside")

    def __init__(self) -> None:
        self._known: dict[str, _Tenant] = {}
        self.inside: dict[int, _Tenant] = {}

    def admit(self, query: Query, needed_ns: int, slo_ns: int, merge_key: int, now_ns: int) -> Query | None:
        """The query as a probe, where its tenant may have one now: merged with no other query, with a late deadline.

        It is predicted to take `needed_ns`, more than the tenant's SLO. Its own deadline becomes its time-out, wherever
        it is then.
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
        """A launch has ended that ran so long: it matters where it is the first one of a probe."""
        known = self.inside.pop(launch.queries[0], None)
        if known is None:
            return
        took_ns = known.needed_ns * ran_ns // max(1, launch.predicted_ns)  # of the whole model
        is_faster = not has_failed and took_ns <= known.slo_ns
        known.misses = 0 if is_faster else min(_MOST_MISSES, known.misses + 1)
        wait_ns = took_ns * (FASTER if is_faster else SLOWER << known.misses - 1)
        known.next_ns = now_ns + min(MOST_NS, max(LEAST_NS, FAILED_NS if has_failed else 0, wait_ns))

    def forget(self, tenant: str) -> None:
        """A tenant is gone, or another has its name."""
        known = self._known.pop(tenant, None)
        if known is not None:
            self.inside.pop(known.query, None)
