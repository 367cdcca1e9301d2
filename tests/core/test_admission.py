"""Admission tries the numbers of cores that a query can get: where the most are not the fastest, it is still let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from cotenant.core.admission import OPEN, Gate, gate_of, hopeless, refusal, sizes_to_try
from cotenant.core.queues import TenantQueue
from cotenant.core.rate_limit import RateLimit
from cotenant.core.snapshot import DropRule
from cotenant.policies.ordered.edf import Edf
from cotenant.types import LossCause, Query, StageQuery, Tenant
from cotenant.work import Share, Work

LANES = tuple(Share((core,)) for core in range(4))
TENANT = Tenant("a", slo_ns=100)


@dataclass(frozen=True, slots=True)
class Joining(Edf):
    """One that launches in unions of its lanes."""

    name: ClassVar[str] = "joining"

    def __post_init__(self) -> None:
        Edf.__post_init__(self)
        self.specify(shares=(*self.lanes, Share((0, 1, 2, 3))))


class Stepped:
    """Fastest on three cores; remembers how often it was asked."""

    asked = 0

    def latency_ns(self, work: Work, size: int, device: str = "cpu") -> int:
        self.asked += 1
        return {1: 160, 2: 110, 3: 90, 4: 120}[size]

    def upper_ns(self, tenant: str, latency_ns: int, slo_ns: int) -> int:
        return latency_ns


def test_a_policy_of_unions_gets_any_number_of_cores() -> None:
    assert sizes_to_try(Joining(LANES).spec) == (4, 3, 2, 1)
    assert sizes_to_try(Edf(LANES).spec) == (1,)
    assert sizes_to_try(Edf((Share((0, 1)), Share((2,)))).spec) == (2,)


@pytest.mark.parametrize(("deadline", "is_in", "asked"), [(120, True, 1), (90, True, 5), (89, False, 5)])
def test_fewer_cores_than_the_most_are_tried(deadline: int, is_in: bool, asked: int) -> None:
    stepped, queue = Stepped(), TenantQueue(TENANT)
    query = Query(0, "a", 0, deadline)
    sizes = sizes_to_try(Joining(LANES).spec)
    text = refusal(query, queue, drop=DropRule.HOPELESS, predictor=stepped, sizes=sizes, draining=False, now_ns=0)
    assert (text is None) is is_in
    assert stepped.asked == asked
    if text is not None:
        assert text == ("0.0 ms of work do not fit into 0.0 ms", UNSET, False, 0)


@pytest.mark.parametrize("late_ns", [1, 49_999, 50_000, 10**6, 10**12])
def test_a_deadline_that_has_passed_is_said_and_no_time_left_is_negative(late_ns: int) -> None:
    queue = TenantQueue(TENANT)
    query = Query(0, "a", 0, 1000)
    found = refusal(
        query, queue, drop=DropRule.HOPELESS, predictor=Stepped(), sizes=(1,), draining=False, now_ns=1000 + late_ns
    )
    assert found is not None
    assert found.reason == f"its deadline passed {late_ns / 1e6:.1f} ms before its body had come and was decoded"
    assert "-" not in hopeless(10**6, -late_ns)
    assert "after the deadline" in hopeless(10**6, -late_ns)


S = 1_000_000_000


@given(st.floats(0.1, 1000), st.lists(st.integers(0, 2 * S), min_size=1, max_size=200))
def test_a_rate_is_never_exceeded_by_more_than_a_second_of_queries(per_s: float, gaps: list[int]) -> None:
    limit, now, taken = RateLimit(per_s), 0, list[int]()
    for gap in gaps:
        now += gap
        if limit.opens_ns <= now:
            limit.take(now)
            taken.append(now)
    for at, first in enumerate(taken):
        for last in range(at, len(taken)):
            assert last - at + 1 <= max(1.0, per_s) + per_s * (taken[last] - first) / S + 1e-3


def test_a_rate_lets_all_through_that_keep_it_and_a_burst_of_a_second() -> None:
    limit = RateLimit(10.0)
    for number in range(30):
        assert limit.opens_ns <= number * S // 10
        limit.take(number * S // 10)
    limit = RateLimit(10.0)
    for _ in range(10):
        assert limit.opens_ns <= 5 * S
        limit.take(5 * S)
    assert limit.opens_ns == 5 * S + S // 10


def fed(queue: TenantQueue, query: Query, now_ns: int) -> object:
    options = {"drop": DropRule.NONE, "predictor": Stepped(), "sizes": (4,), "draining": False, "now_ns": now_ns}
    return refusal(query, queue, **options)  # type: ignore[arg-type]


def test_beyond_its_rate_a_tenants_queries_are_refused_and_its_stages_are_not() -> None:
    queue = TenantQueue(Tenant("a", slo_ns=100, max_rate=1.0))
    query = Query(1, "a", 0, 100)
    assert fed(queue, query, 0) is None
    assert queue.limit is not None
    queue.limit.take(0)
    refused = fed(queue, query, S - 1)
    assert refused is not None
    assert refused.cause is LossCause.RATE_LIMIT  # type: ignore[attr-defined]
    assert fed(queue, StageQuery(1, "a", 0, 100), S - 1) is None
    assert fed(queue, query, S) is None
    gate = gate_of(queue, draining=False, is_away=False, now_ns=S - 1)
    assert gate == Gate(opens_ns=S)
    assert gate.refusal("a", S - 1) == refused
    assert gate.refusal("a", S) is None


def test_a_gate_refuses_what_the_core_would_whatever_the_query_is() -> None:
    queue = TenantQueue(Tenant("a", slo_ns=100, max_queue=1))
    assert gate_of(queue, draining=False, is_away=False, now_ns=0) is OPEN
    assert gate_of(None, draining=True, is_away=False, now_ns=0) is OPEN
    query = Query(1, "a", 0, 100)
    queue.push((1,), query)
    gate = gate_of(queue, draining=False, is_away=True, now_ns=0)
    assert gate == Gate(is_away=True, max_waiting=1)
    assert gate.refusal("a", 0) == fed(queue, query, 0)
    drains = gate_of(queue, draining=True, is_away=False, now_ns=0).refusal("a", 0)
    assert drains is not None
    assert drains.cause is LossCause.GONE
    assert Gate().refusal("a", 0) is None
    assert msgspec.json.decode(msgspec.json.encode(gate), type=Gate) == gate
