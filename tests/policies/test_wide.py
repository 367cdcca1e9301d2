"""Lanes that widen: a lone query gets several cores, and gives them back at the next boundary."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.admission import most_cores
from cotenant.errors import InvalidValueError
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.wide import unions
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Share
from scenario import MS, TWO_LANES, Recording, play

FOUR_LANES = tuple(Share((core,)) for core in range(4))
WIDE = Edf(TWO_LANES, widen=2)


def table(*latency_ns: int, units: int = 1) -> LatencyTable:
    """Latencies on 1, 2, 4 cores."""
    rows = tuple(LatencyRow(0, 1, 1 << number, each) for number, each in enumerate(latency_ns))
    return LatencyTable(rows, (1.0,) * units)


PREDICTOR = TablePredictor(
    {
        "big": table(80 * MS, 44 * MS, 26 * MS, units=8),
        "stiff": table(80 * MS, 70 * MS, 60 * MS, units=8),
        "whole": table(80 * MS, 44 * MS),
        "quick": table(6 * MS, 4 * MS),
    }
)
EIGHT = tuple(range(9))
BIG = Tenant("big", 200 * MS, cuts=EIGHT)
STIFF = Tenant("stiff", 200 * MS, cuts=EIGHT)
WHOLE = Tenant("whole", 200 * MS)
QUICK = Tenant("quick", 30 * MS)


def shares(made: Recording) -> list[tuple[int, tuple[int, ...], int]]:
    """Beginning in ms, cores and last unit of each launch."""
    return [(now // MS, launch.share.cores, launch.work.end) for now, launch in made.launches]


def test_unions_are_neighbours_by_powers_of_two_the_largest_first() -> None:
    assert [each.cores for each in unions(FOUR_LANES, 4)] == [(0, 1, 2, 3), (0, 1), (2, 3)]
    assert [each.cores for each in unions(FOUR_LANES[:3], 3)] == [(0, 1)]
    assert unions(FOUR_LANES, 1) == unions((Share((0,), "cuda:0"), Share((1,), "cuda:0")), 2) == ()
    assert WIDE.spec.shares == (*TWO_LANES, Share((0, 1)))
    assert most_cores(WIDE.spec) == 2
    assert Edf(TWO_LANES).spec.shares == TWO_LANES


def test_a_lone_query_gets_both_lanes_and_gives_them_back_at_its_next_boundary() -> None:
    queries = [Query(0, "big", 0, 200 * MS), Query(1, "quick", 7 * MS, 37 * MS)]
    made = play(WIDE, [BIG, QUICK], PREDICTOR, queries)
    begun = shares(made)
    # Of quick's slack of 24 ms one launch may use up 2.4: it runs to its next cut, 44 / 8 ms long.
    assert begun[:3] == [(0, (0, 1), 1), (5, (0, 1), 2), (11, (0,), 1)]
    assert begun[3:5] == [(11, (1,), 3), (21, (0, 1), 4)], "and again when that one has gone"
    assert set(made.outcomes.values()) == {Outcome.ANSWERED}
    alone = play(WIDE, [BIG], PREDICTOR, queries[:1])
    assert alone.end_ns == pytest.approx(44 * MS, rel=0.01)
    assert play(replace(WIDE, widen=1), [BIG], PREDICTOR, queries[:1]).end_ns == 80 * MS


def test_what_gains_too_little_or_would_hold_all_lanes_for_long_stays_in_one() -> None:
    for tenant in (STIFF, WHOLE):
        made = play(WIDE, [tenant], PREDICTOR, [Query(0, tenant.name, 0, 200 * MS)])
        assert shares(made) == [(0, (0,), tenant.cuts[-1])]
    patient = replace(WHOLE, slo_ns=600 * MS)  # nobody loses a tenth of his slack by 44 ms
    assert shares(play(WIDE, [patient], PREDICTOR, [Query(0, "whole", 0, 600 * MS)])) == [(0, (0, 1), 1)]


def test_two_of_four_lanes_are_widened_beside_others() -> None:
    policy = Edf(FOUR_LANES, widen=4)
    queries = [Query(number, "stiff", 0, 200 * MS) for number in range(2)] + [Query(2, "big", MS, 201 * MS)]
    made = play(policy, [BIG, STIFF], PREDICTOR, queries, cores=range(4))
    assert [cores for _, cores, _ in shares(made)[:3]] == [(0,), (1,), (2, 3)]
    alone = play(policy, [BIG], PREDICTOR, queries[2:], cores=range(4))
    assert {cores for _, cores, _ in shares(alone)} == {(0, 1, 2, 3)}


def test_who_is_in_time_on_two_cores_only_is_served_when_they_are_free() -> None:
    hurried = replace(BIG, slo_ns=70 * MS)
    made = play(WIDE, [hurried, QUICK], PREDICTOR, [Query(0, "big", 0, 70 * MS)])
    assert made.outcomes == {0: Outcome.ANSWERED}
    assert {cores for _, cores, _ in shares(made)} == {(0, 1)}
    late = [Query(0, "quick", 0, 30 * MS), Query(1, "quick", 0, 30 * MS), Query(2, "big", 0, 70 * MS)]
    waited = play(WIDE, [hurried, QUICK], PREDICTOR, late)
    assert set(waited.outcomes.values()) == {Outcome.ANSWERED}
    narrow = play(replace(WIDE, widen=1), [hurried, QUICK], PREDICTOR, late)
    assert narrow.outcomes[2] is not Outcome.ANSWERED  # a probe, since one core is never enough for it


def test_widths_below_one_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="widen is 0, expected at least 1"):
        Edf(TWO_LANES, widen=0)


@settings(deadline=None, max_examples=60)
@given(
    arrivals=st.lists(st.tuples(st.sampled_from(["big", "stiff", "whole", "quick"]), st.integers(0, 60)), max_size=20),
    policy=st.sampled_from([WIDE, Edf(FOUR_LANES, widen=4), Edf(FOUR_LANES, widen=2), Fcfs(FOUR_LANES, widen=4)]),
)
def test_whoever_waits_gets_a_lane_before_one_is_widened(arrivals: list[tuple[str, int]], policy: Edf | Fcfs) -> None:
    """When a launch wider than a lane begins, nobody waits who could be in time in a lane."""
    tenants = {each.name: each for each in (BIG, STIFF, WHOLE, QUICK)}
    at, queries = 0, []
    for number, (name, gap) in enumerate(arrivals):
        at += gap * MS
        queries.append(Query(number, name, at, at + tenants[name].slo_ns))
    made = play(policy, tenants.values(), PREDICTOR, queries, cores=range(4))
    size = policy.lanes[0].size
    begun: dict[int, int] = {}
    for now, launch in made.launches:
        for query in launch.queries:
            begun.setdefault(query, now)
    for now, launch in made.launches:
        if launch.share.size == size or launch.queries[0] not in begun:
            continue
        waiting = [
            query
            for query in queries
            if query.arrival_ns < now < begun.get(query.id, made.ended_ns[query.id])
            and now + PREDICTOR.latency_ns(tenants[query.tenant].work(0, 1), size) <= query.deadline_ns
        ]
        assert not waiting, f"{waiting} waited while {launch} was widened"
