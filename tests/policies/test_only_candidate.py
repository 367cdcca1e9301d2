"""List policies have a short way for an only candidate: it gives the actions of the long way, over drawn histories."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from cotenant.core.actions import Launch, Respond, SetTimer
from cotenant.core.events import Event, LaunchEnded, QueryArrived, QueryCancelled, TimerFired
from cotenant.core.snapshot import DropRule, Snapshot, Start
from cotenant.policies import policy_class
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.predict.margin import NO_MARGIN, SafetyMargin, Spread
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share, Work
from scenario import MS
from strict_engine import StrictEngine as Engine

PLAIN = ("edf", "sjf", "fcfs")
NAMES = (*PLAIN, "shares", "most", "fair", "weighted")
MODELS = ((1, 1, 8), (2, 4, 9), (30, 12, 250), (5, 3, 20), (8, 1, 60), (13, 6, 70), (21, 2, 400), (3, 5, 30))
"""Latency in ms, units, SLO in ms."""
LANES = (
    (Share((0, 1)),),
    (Share((0,)), Share((1,))),
    (Share((0,)), Share((1, 2))),
)
PREDICTOR = TablePredictor(
    {
        f"t{number}": LatencyTable(
            tuple(
                LatencyRow(0, rows, cores, round(ms * MS * (1 + 0.4 * (rows - 1)) / cores**0.7))
                for rows in (1, 8)
                for cores in (1, 2)
            ),
            (1.0,) * units,
            1.1,
        )
        for number, (ms, units, _) in enumerate(MODELS)
    }
)
MARGIN = SafetyMargin({f"t{number}": Spread(1.4, 10 * MS) for number in range(len(MODELS))}, 200_000)

Step = tuple[int, int, int, int, int, int, int, int]
"""Quarters of a millisecond since the step before, first tenant and number of tenants that ask, rows, rank of the
requests, percent of the SLO that is left, percent of the predicted latency that launches take, and after how many
further steps the clients leave (0: never)."""
STEPS = st.lists(
    st.tuples(
        *(
            st.sampled_from([0, 1, 3, 8, 16, 16, 40, 60, 4000]),
            st.integers(0, len(MODELS) - 1),
            st.sampled_from([1, 1, 1, 3]),
        ),
        *(st.integers(1, 2), st.integers(1, 2), st.sampled_from([100, 100, 60, 30])),
        *(st.sampled_from([100, 100, 70, 250]), st.sampled_from([0, 0, 0, 1, 2])),
    ),
    min_size=25,
    max_size=50,
)


class Seen:
    """What became of the short way in the histories of a test."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.declined = 0
        """Times that an only candidate could begin, and others could not all be in time beside it."""


def without_short_way(kind: type[ListPolicy]) -> type[ListPolicy]:
    def nothing(self: ListPolicy, snapshot: Snapshot, free: int) -> Start | None:
        return None

    return type("LongWay", (kind,), {"__slots__": (), "_only_start": nothing})


def with_count(kind: type[ListPolicy], seen: Seen) -> type[ListPolicy]:
    """The policy as it is, which also notes the starts of the short way."""

    def noted(self: ListPolicy, snapshot: Snapshot, free: int) -> Start | None:
        found = kind._only_start(self, snapshot, free)
        if found is not None:
            seen.starts.append(found)
        return found

    def is_forced(self: ListPolicy, snapshot: Snapshot, work: Work, deadline_ns: int) -> bool:
        found = kind._is_forced(self, snapshot, work, deadline_ns)
        seen.declined += not found
        return found

    return type("Counted", (kind,), {"__slots__": (), "_only_start": noted, "_is_forced": is_forced})


def reserve_of(engine: Engine) -> object:
    """The time and the sums of the reserve that the next decision goes by."""
    reserve = getattr(engine.guard.memory, "reserve", None)
    return reserve and (reserve.made_ns, reserve.keys, reserve.in_quota, reserve.out_of_quota)


def tenants(shape: str) -> list[Tenant]:
    """Those that differ as the word says."""
    return [
        Tenant(
            f"t{number}",
            slo * MS,
            cuts=tuple(range(units + 1)),
            max_batch=4,
            weight=1.0 + number % 3 if shape == "weights" else 1.0,
            priority=1 + number % 2 if shape == "priorities" else 0,
            rate=20.0 if shape == "rates" and number % 4 == 0 else UNSET,
        )
        for number, (_, units, slo) in enumerate(MODELS)
    ]


def play_both(policies: Sequence[ListPolicy], shape: str, predictor: TablePredictor, steps: Sequence[Step]) -> None:
    """One history for two engines, which have to do the same after each event."""
    known = tenants(shape)
    first, second = (Engine(known, policy, predictor, Machine.cpu((0, 1, 2))) for policy in policies)
    due: list[tuple[int, int, Event]] = []
    live: set[int] = set()
    percent = 100

    def handle(event: Event, now_ns: int) -> None:
        actions = first.handle(event, now_ns)
        assert actions == second.handle(event, now_ns)
        assert reserve_of(first) == reserve_of(second)
        for action in actions:
            if isinstance(action, Launch):
                takes_ns = max(1, action.predicted_ns * percent // 100)
                heappush(due, (now_ns + takes_ns, action.id, LaunchEnded(action.id)))
            elif isinstance(action, SetTimer):
                heappush(due, (max(now_ns, action.at_ns), -1, TimerFired()))
            elif isinstance(action, Respond):
                live.discard(action.query)

    def run_until(until_ns: int) -> None:
        while due and due[0][0] <= until_ns:
            now_ns, _, event = heappop(due)
            handle(event, now_ns)

    now_ns, number, leaving = 1, 0, dict[int, list[int]]()
    for at, (gap, owner, count, rows, rank, left, takes, leaves) in enumerate(steps):
        now_ns += gap * MS // 4
        run_until(now_ns)
        percent = takes
        for gone in leaving.get(at, ()):
            if gone in live:
                handle(QueryCancelled(gone), now_ns)
        for each in range(count):
            tenant = known[(owner + each) % len(known)]
            deadline_ns = now_ns + tenant.slo_ns * left // 100
            live.add(number)
            query = Query(number, tenant.name, now_ns, deadline_ns, items=rows, rank=rank)
            handle(QueryArrived(query, more=each < count - 1), now_ns)
            if leaves:
                leaving.setdefault(at + leaves, []).append(number)
            number += 1
    run_until(now_ns + 10**12)
    assert not live


@pytest.mark.parametrize("name", NAMES)
def test_the_short_way_does_what_the_long_way_does(name: str) -> None:
    kind, seen = policy_class(name), Seen()

    @settings(max_examples=80, deadline=None, database=None, derandomize=True)
    @given(
        STEPS,
        st.sampled_from(["alike", "weights", "priorities", "rates"]),
        st.sampled_from(LANES),
        st.sampled_from([NO_MARGIN, MARGIN]),
        st.fixed_dictionaries(
            {
                "drop": st.sampled_from([*[DropRule.HOPELESS] * 6, *DropRule]),
                "preempt": st.sampled_from([True, True, False]),
                "slack_share": st.sampled_from([0.0, 0.02, 0.1]),
                "tail_aware": st.booleans(),
                "widen": st.sampled_from([1, 1, 1, 1, 1, 2]),
            }
        ),
    )
    def compare(
        steps: list[Step], shape: str, lanes: tuple[Share, ...], margin: SafetyMargin, options: dict[str, Any]
    ) -> None:
        both = with_count(kind, seen)(lanes, **options), without_short_way(kind)(lanes, **options)
        play_both(both, shape, PREDICTOR.with_margin(margin), steps)

    compare()
    assert len(seen.starts) > 500, "histories in which hardly anything is alone"
    assert len([start for start in seen.starts if start.batch is not None]) > 50, "hardly anything pauses alone"
    assert seen.declined > 10 or name in PLAIN, "histories in which hardly anything has to go"


@pytest.mark.parametrize("name", NAMES)
def test_a_lone_query_takes_the_short_way(name: str) -> None:
    seen = Seen()
    policy = with_count(policy_class(name), seen)(LANES[1])
    engine = Engine(tenants("alike"), policy, PREDICTOR, Machine.cpu((0, 1, 2)))
    for number in range(3):
        now_ns = number * 60 * MS
        actions = engine.handle(QueryArrived(Query(number, "t4", now_ns, now_ns + 60 * MS)), now_ns)
        [launch] = [action for action in actions if isinstance(action, Launch)]
        engine.handle(LaunchEnded(launch.id), now_ns + launch.predicted_ns)
    assert [start.queries[0].id for start in seen.starts] == [0, 1, 2]
