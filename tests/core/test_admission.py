"""Admission tries the numbers of cores that a query can get: where the most are not the fastest, it is still let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from msgspec import UNSET

from cotenant.core.admission import hopeless, refusal, sizes_to_try
from cotenant.core.queues import TenantQueue
from cotenant.core.snapshot import DropRule
from cotenant.policies.ordered.edf import Edf
from cotenant.types import Query, Tenant
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

    def sure_ns(self, tenant: str, latency_ns: int, slo_ns: int) -> int:
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
