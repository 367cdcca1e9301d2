"""Who goes first: the orders of fcfs, sjf and edf, and preemption at the boundaries between segments."""

from __future__ import annotations

from random import Random

import pytest

from cotenant.core.snapshot import DropRule
from cotenant.errors import InvalidValueError
from cotenant.policies import policy_class
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.sjf import Sjf
from cotenant.types import Outcome, Query, Tenant, priority_rank
from scenario import MS, ONE_LANE, TWO_LANES, play, tables

LATENCIES = {"block": 5 * MS, "x": 30 * MS, "y": 10 * MS, "z": 20 * MS}
PREDICTOR = tables(LATENCIES)
TENANTS = [Tenant(name, 1000 * MS) for name in LATENCIES]
NONE = DropRule.NONE
BLOCK = Query(0, "block", 0, 1000 * MS)  # keeps the device busy while the others arrive


def three(**priorities: int) -> list[Query]:
    """x, y, z arrive in this order with deadlines in the order z, x, y."""
    deadlines = {"x": 200 * MS, "y": 300 * MS, "z": 100 * MS}
    ranks = {name: priority_rank(priorities.get(name, 0)) for name in deadlines}
    return [BLOCK] + [Query(at, name, at, deadlines[name], ranks[name]) for at, name in enumerate("xyz", start=1)]


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", "xyz"), ("sjf", "yzx"), ("edf", "zxy")], ids=["fcfs", "sjf", "edf"]
)
def test_each_policy_has_its_order(policy: str, order: str) -> None:
    made = play(policy_class(policy)(ONE_LANE, NONE), TENANTS, PREDICTOR, three())
    assert [launch.work.tenant for _, launch in made.launches] == ["block", *order]


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "edf"])
def test_priorities_of_tenants_beat_arrivals_works_and_deadlines(policy: str) -> None:
    tenants = [Tenant(name, 1000 * MS, priority={"y": 1, "z": 2}.get(name, 0)) for name in LATENCIES]
    made = play(policy_class(policy)(ONE_LANE, NONE), tenants, PREDICTOR, three())
    assert [launch.work.tenant for _, launch in made.launches] == ["block", *"yzx"]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "xyz"), ("sjf", "yzx"), ("edf", "zxy")])
def test_priorities_of_requests_beat_no_other_tenant(policy: str, order: str) -> None:
    for asked in ({"x": 1}, {"y": 1, "z": 2}, {"x": 3, "y": 2, "z": 1}):
        made = play(policy_class(policy)(ONE_LANE, NONE), TENANTS, PREDICTOR, three(**asked))
        assert [launch.work.tenant for _, launch in made.launches] == ["block", *order]


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "edf"])
def test_priorities_of_requests_order_the_queries_of_their_tenant(policy: str) -> None:
    rng = Random(policy)
    for _ in range(30):
        levels = [rng.randint(0, 3) for _ in range(9)]
        queries = [
            Query(at, "x", 1, rng.randint(500, 900) * MS, priority_rank(level)) for at, level in enumerate(levels, 1)
        ]
        made = play(policy_class(policy)(ONE_LANE, NONE), TENANTS, PREDICTOR, [BLOCK, *queries])
        served = [priority_rank(levels[number - 1]) for (number,) in made.order[1:]]
        assert served == sorted(served)


def test_a_given_priority_beats_none_and_level_one_beats_level_two() -> None:
    assert priority_rank(1) < priority_rank(2) < priority_rank(65_535) < priority_rank(0)


def test_weights_shorten_jobs_in_sjf() -> None:
    tenants = [Tenant(name, 1000 * MS, weight=4.0 if name == "x" else 1.0) for name in LATENCIES]
    made = play(Sjf(ONE_LANE, NONE), tenants, PREDICTOR, three())
    assert [launch.work.tenant for _, launch in made.launches] == ["block", "x", "y", "z"]  # 30 / 4 < 10 < 20


def test_fcfs_ends_in_the_order_of_arrival() -> None:
    queries = [Query(at, "xyz"[at % 3], at * 7 * MS, 10_000 * MS) for at in range(60)]
    made = play(Fcfs(ONE_LANE, NONE), TENANTS, PREDICTOR, queries)
    ends = [made.ended_ns[query.id] for query in queries]
    assert ends == sorted(ends)
    assert len(made.launches) == 60


def test_two_lanes_take_the_two_best() -> None:
    made = play(
        Edf(TWO_LANES, NONE, preempt=False), TENANTS, PREDICTOR, [BLOCK, Query(9, "block", 0, 10**9), *three()[1:]]
    )
    began = [(launch.work.tenant, launch.share.cores) for _, launch in made.launches]
    assert began == [("block", (0,)), ("block", (1,)), ("z", (0,)), ("x", (1,)), ("y", (0,))]


# --- preemption ------------------------------------------------------------------------------------------------

LONG = Tenant("long", 1000 * MS, cuts=(0, 1, 2, 3, 4))
TIGHT = Tenant("tight", 60 * MS)
CUT = tables({"long": 80 * MS, "tight": 10 * MS}, 4)
CUT = type(CUT)({"long": CUT.tables["long"], "tight": tables({"tight": 10 * MS}).tables["tight"]})
SEGMENTED = [Query(0, "long", 0, 1000 * MS), Query(1, "tight", 25 * MS, 85 * MS)]


def spans(made: object) -> list[tuple[int, str, int, int]]:
    return [(at // MS, launch.work.tenant, launch.work.start, launch.work.end) for at, launch in made.launches]  # type: ignore[attr-defined]


def test_edf_lets_a_tight_query_go_first_at_the_next_boundary_and_resumes() -> None:
    made = play(Edf(ONE_LANE, slack_share=0.0), [LONG, TIGHT], CUT, SEGMENTED)
    assert spans(made) == [
        (0, "long", 0, 1),
        (20, "long", 1, 2),
        (40, "tight", 0, 1),
        (50, "long", 2, 3),
        (70, "long", 3, 4),
    ]
    assert made.ended_ns == {1: 50 * MS, 0: 90 * MS}


def test_without_preemption_the_tight_query_waits_for_the_end() -> None:
    made = play(Edf(ONE_LANE, preempt=False), [LONG, TIGHT], CUT, SEGMENTED)
    assert spans(made) == [(0, "long", 0, 4)]
    assert made.outcomes == {0: Outcome.ANSWERED, 1: Outcome.DROPPED}


def test_stretch_bounds_how_long_a_boundary_stays_away() -> None:
    # The slack of a tight query is 60 - 10 = 50 ms: a share of 0.8 is 40 ms, two units of 20 ms; 0.3 is less than one.
    for slack_share, first_end in ((0.8, 2), (0.79, 1), (0.3, 1), (1.0, 2)):
        made = play(Edf(ONE_LANE, slack_share=slack_share), [LONG, TIGHT], CUT, SEGMENTED[:1])
        assert spans(made)[0] == (0, "long", 0, first_end), slack_share


def test_nothing_is_cut_when_nobody_could_go_first() -> None:
    relaxed = Tenant("tight", 2000 * MS)
    made = play(Edf(ONE_LANE, slack_share=0.001), [LONG, relaxed], CUT, SEGMENTED[:1])
    assert spans(made) == [(0, "long", 0, 4)]
    urgent = Tenant("tight", 2000 * MS, priority=1)
    made = play(Edf(ONE_LANE, slack_share=0.001), [LONG, urgent], CUT, SEGMENTED[:1])
    assert len(spans(made)) == 4
    alone = play(Edf(ONE_LANE, slack_share=0.1), [LONG], CUT, SEGMENTED[:1])
    assert spans(alone) == [(0, "long", 0, 4)]


def test_preemptive_sjf_goes_by_what_remains() -> None:
    # At 40 ms the long one has 40 ms left: a job of 50 ms does not go first any more, one of 10 ms does.
    middle = tables({"middle": 50 * MS}).tables["middle"]
    predictor = type(CUT)({**CUT.tables, "middle": middle})
    tenants = [LONG, TIGHT, Tenant("middle", 1000 * MS)]
    queries = [SEGMENTED[0], Query(1, "middle", 25 * MS, 900 * MS), Query(2, "tight", 55 * MS, 900 * MS)]
    made = play(Sjf(ONE_LANE, preempt=True, slack_share=0.0), tenants, predictor, queries)
    assert [span[:2] for span in spans(made)] == [
        (0, "long"),
        (20, "long"),
        (40, "long"),
        (60, "tight"),
        (70, "long"),
        (90, "middle"),
    ]


def test_a_paused_batch_that_has_become_hopeless_is_dropped_and_released() -> None:
    queries = [Query(0, "long", 0, 81 * MS), Query(1, "tight", 25 * MS, 75 * MS)]
    made = play(Edf(ONE_LANE, slack_share=0.0), [LONG, TIGHT], CUT, queries)
    assert made.outcomes == {0: Outcome.DROPPED, 1: Outcome.ANSWERED}
    assert made.ended_ns[0] == 50 * MS
    assert made.reasons[0] == "hopeless: 40.0 ms of work left, 31.0 ms to the deadline"


@pytest.mark.parametrize(
    "options", [{"lanes": ()}, {"lanes": ONE_LANE, "slack_share": 1.5}, {"lanes": ONE_LANE, "drop": "none"}], ids=str
)
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(InvalidValueError, match=r"policy 'edf': (lanes|slack_share|drop) is"):
        Edf(**options)  # type: ignore[arg-type]
