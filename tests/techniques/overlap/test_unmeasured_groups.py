"""Groups of numbers of members that were never measured: started only where no deadline hangs on what is believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.abacus._group_world import GroupWorld
from cotenant.core.actions import Action, Launch, Respond, group_of
from cotenant.core.events import Event, LaunchEnded, QueryArrived
from cotenant.core.predictor import Group
from cotenant.predict.grouped import FittedGroups
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.trace.basis import GroupTally
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Share
from scenario import MS, Recording, play

UNITS = 4
CORES = (0, 1, 2)
LANES = tuple(Share((core,)) for core in CORES)
TENANTS = {name: Tenant(name, 100 * MS, cuts=tuple(range(UNITS + 1)), max_batch=1) for name in "abcd"}
TABLES = {name: LatencyTable((LatencyRow(0, 1, 3, 10 * MS),), (1.0,) * UNITS) for name in "abcd"}


class Believing(TablePredictor):
    """Groups take little more than their longest member, of which only those of `measured` numbers are known."""

    def __init__(self, measured: Sequence[int] = (1, 2)) -> None:
        super().__init__(TABLES)
        self.measured = frozenset(measured)

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        return [max(each) + (sum(each) - max(each)) // 5 for each in map(self.alone, groups)]

    def longest_ns(self, groups: Sequence[Group]) -> list[int]:
        made = zip(groups, self.group_ns(groups), strict=True)
        return [ns if len(group) in self.measured else max(ns, sum(self.alone(group))) for group, ns in made]

    def unmeasured(self, most: int) -> frozenset[int]:
        return frozenset(range(2, most + 1)) - self.measured

    def alone(self, group: Group) -> list[int]:
        return [self.latency_ns(work, 3) for work, _ in group]


class Near(FittedGroups):
    """No measured group is near one of two members."""

    quantile, key = 0.5, "near"

    def near(self, group: Group) -> int:
        return 0 if len(group) == 2 else 10


def run(queries: Sequence[Query], believed: Believing | None = None, **options: object) -> Recording:
    """In a world where such groups take as long as they can."""
    believed = believed or Believing()
    world = GroupWorld(lambda group: believed.longest_ns([group])[0])
    policy = Overlap(LANES, **options)  # type: ignore[arg-type]
    return play(policy, TENANTS.values(), believed, queries, world, cores=CORES)


def query(number: int, tenant: str, slo_ms: float, arrival_ms: float = 1, **more: int) -> Query:
    arrival = round(arrival_ms * MS)
    return Query(number, tenant, arrival, arrival + round(slo_ms * MS), **more)


def groups_of(made: Recording) -> list[str]:
    """The tenants of each group. The first one runs from 0 to 10 ms, as nobody else is there."""
    found: dict[int, str] = {}
    for _, launch in made.launches:
        found[group_of(launch)] = found.get(group_of(launch), "") + launch.work.tenant
    return ["".join(sorted(found[number])) for number in sorted(found)]


FIRST = query(0, "a", 500, 0)


def test_it_is_started_where_everybody_would_be_in_time_though_it_took_as_long_as_it_can() -> None:
    made = run([FIRST, query(1, "a", 200), query(2, "b", 200), query(3, "c", 200)])
    assert groups_of(made) == ["a", "abc"]
    told = [(launch.predicted_ns, launch.basis.longest_ns) for _, launch in made.launches]
    assert told == [(10 * MS, 0), *[(14 * MS, 30 * MS)] * 3], "one alone is known"


def test_a_run_tells_what_its_groups_rested_on() -> None:
    tally = GroupTally(Overlap(LANES), Near())
    arrivals = zip("bcaabc", (1, 1, 30, 31, 31, 31), strict=True)
    queries = [FIRST, *(query(number, name, 200, at) for number, (name, at) in enumerate(arrivals, 1))]
    believed = Believing()
    world = GroupWorld(lambda group: believed.longest_ns([group])[0])
    made = play(Overlap(LANES), TENANTS.values(), believed, queries, world, log=tally, cores=CORES)
    started = Counter(map(len, groups_of(made)))
    assert len(started) == 3, "groups of one, two and three"
    assert [(each.members, each.started, each.nothing_near) for each in tally.found] == [
        (1, started[1], 0),
        (2, started[2], started[2]),
        (3, started[3], 0),
    ]
    assert [each.unmeasured for each in tally.found] == [0, 0, started[3]]
    assert "of a size never measured" in str(tally.found[2])
    assert str(tally.found[1]).endswith(f"of 2 members ({started[2]} with no measured group near)")
    without = GroupTally(Overlap(LANES), None)
    play(Overlap(LANES), TENANTS.values(), TablePredictor(TABLES), queries, log=without, cores=CORES)
    assert without.found == []


@pytest.mark.parametrize(
    "queries",
    [
        [query(1, "a", 35), query(2, "b", 200), query(3, "c", 200)],
        [query(1, "a", 40), query(2, "b", 200), query(3, "c", 200), query(4, "a", 44)],
        [query(1, "a", 41), query(2, "b", 42), query(3, "c", 43), query(4, "d", 44)],
    ],
    ids=["a member", "the next in the queue of a member", "one left out"],
)
def test_it_is_not_started_where_somebody_would_be_late_if_it_took_as_long(queries: list[Query]) -> None:
    """It would begin at 10 ms and end at 24, as is believed, or at 40: somebody has time for the one alone."""
    options = {"preempt": False, "repeat": False}
    made = run([FIRST, *queries], **options)
    assert len(groups_of(made)[1]) == 2
    assert not any(launch.basis.longest_ns for _, launch in made.launches[:3])
    assert set(made.outcomes.values()) == {Outcome.ANSWERED}
    trusting = run([FIRST, *queries], Believing((1, 2, 3)), **options)
    assert groups_of(trusting)[1] == "abc", "were it measured, it would be"


def test_where_nothing_was_measured_but_single_launches_those_with_time_to_spare_overlap() -> None:
    spare = [FIRST, query(1, "a", 200), query(2, "b", 200), query(3, "c", 200)]
    assert groups_of(run(spare, Believing((1,)))) == ["a", "abc"]
    pressed = [FIRST, query(1, "a", 27), query(2, "b", 37), query(3, "c", 60)]
    made = run(pressed, Believing((1,)), preempt=False)
    assert groups_of(made) == ["a", "a", "b", "c"]
    assert set(made.outcomes.values()) == {Outcome.ANSWERED}


@pytest.mark.parametrize(("first_ms", "then"), [(30, "abc"), (32, "ab")])
def test_what_was_chosen_ahead_holds_until_the_last_moment_at_which_all_are_sure(first_ms: int, then: str) -> None:
    """The deadlines are at 61 ms; three take 30 at most. The first group ends later than predicted."""
    believed = Believing()
    left = [first_ms * MS]
    world = GroupWorld(lambda group: left.pop() if left else believed.longest_ns([group])[0])
    queries = [FIRST, *(query(number, name, 60) for number, name in enumerate("abc", 1))]
    policy = Overlap(LANES, preempt=False)
    made = play(policy, TENANTS.values(), believed, queries, world, cores=CORES)
    assert groups_of(made)[1] == then
    assert set(made.outcomes.values()) == {Outcome.ANSWERED}


@st.composite
def loads(draw: st.DrawFn) -> list[Query]:
    slos = {name: draw(st.sampled_from([25, 40, 60, 100])) for name in "abc"}
    arrivals = sorted(draw(st.lists(st.integers(0, 80), min_size=1, max_size=25)))
    return [
        query(number, name, slos[name], at)
        for number, at in enumerate(arrivals)
        for name in draw(st.sampled_from("abc"))
    ]


@settings(max_examples=60, deadline=None)
@given(queries=loads(), measured=st.sampled_from([(1,), (1, 2), (1, 3)]))
def test_nobody_is_ever_late_for_a_belief(queries: list[Query], measured: tuple[int, ...]) -> None:
    """Whenever such a group starts: whoever can be in time alone then can still be after it, if it takes its longest;
    and whoever ends in it is in time."""
    believed = Believing(measured)
    waiting: dict[int, Query] = {}
    inside: dict[int, Launch] = {}
    known = {each.id: each for each in queries}

    def check(now_ns: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, QueryArrived):
            waiting[event.query.id] = event.query
        elif isinstance(event, LaunchEnded):
            inside.pop(event.launch)
        for action in actions:
            if isinstance(action, Launch):
                inside[action.id] = action
                for number in action.queries:
                    waiting.pop(number, None)
            elif isinstance(action, Respond):
                waiting.pop(action.query, None)
        for launch in (each for each in actions if isinstance(each, Launch) and each.basis.longest_ns):
            ended = now_ns + launch.basis.longest_ns
            rest = TENANTS[launch.work.tenant].work(0, launch.work.items, launch.work.end) if not launch.last else None
            after = believed.latency_ns(rest, 3) if rest else 0
            assert all(ended + after <= known[number].deadline_ns for number in launch.queries)
            for each in waiting.values():
                if now_ns + 10 * MS <= each.deadline_ns:
                    assert ended + 10 * MS <= each.deadline_ns

    world = GroupWorld(lambda group: believed.longest_ns([group])[0])
    made = play(Overlap(LANES), TENANTS.values(), believed, queries, world, log=check, cores=CORES)
    assert set(made.outcomes.values()) <= {Outcome.ANSWERED, Outcome.DROPPED}
