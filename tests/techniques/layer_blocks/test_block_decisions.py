"""Decisions of the rules of blocks: what they give out, in which order, and what they write into the rows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from block_models import spans_of
from block_sides import LOW, Side, even, floors, hold, row
from cotenant.techniques.layer_blocks.policy.rules import (
    CORES,
    DEADLINE,
    DROP,
    FIELDS,
    FIXED,
    GROW,
    MODEL,
    PAUSED,
    RUNS,
    START,
    STATE,
    UNIT,
    WAITS,
)
from cotenant.techniques.layer_blocks.policy.rules_blocks import ALGORITHM_2, averages_of

SOME = settings(max_examples=80, deadline=None, database=None)


@SOME
@given(
    floors(),
    st.sampled_from([ALGORITHM_2, 1, 2]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_decisions_of_blocks_hold(
    floor: tuple, grain: int, by_slack: bool, capped: bool, replans: bool, drops: bool
) -> None:
    side, jobs, now, free, _ = floor
    before = list(jobs)
    made = side.blocks(grain, jobs, now, free, by_slack, capped=capped, replans=replans, drops=drops)
    hold(side, before, jobs, made, now, free)
    for number, act, end, *_ in made:
        units, unit = side.models[jobs[FIELDS * number + MODEL]].units, before[FIELDS * number + UNIT]
        if act == START and grain != ALGORITHM_2:
            assert end == min(units, unit + grain)
    idle = free - sum(c[4] - (before[FIELDS * c[0] + CORES] if c[1] == GROW else 0) for c in made if c[1] != DROP)
    waiting = [at for at in range(0, len(jobs), FIELDS) if WAITS <= jobs[at + STATE] <= PAUSED]
    assert not idle or not waiting, "somebody waits beside a free core"


@SOME
@given(floors(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_decisions_by_slack_hold(floor: tuple, drops: bool, narrow: float) -> None:
    side, jobs, now, free, _ = floor
    before = list(jobs)
    made = side.slack(jobs, now, free, drops, (0.9, 800, narrow, 1.3, 0.5))
    hold(side, before, jobs, made, now, free)
    assert all(wanted == 0 for *_, wanted, _, _ in made), "it takes what it planned for"
    begun = [before[FIELDS * c[0] : FIELDS * c[0] + FIELDS] for c in made if c[1] == START]
    order = [(old[-1], not side.presses(old, now, 1.3), old[DEADLINE]) for old in begun]
    assert order == sorted(order), "who has begun and must go on first, then deadlines"
    runs = any(before[at + STATE] >= RUNS for at in range(0, len(before), FIELDS))
    waits = any(WAITS <= jobs[at + STATE] <= PAUSED for at in range(0, len(jobs), FIELDS))
    assert not waits or runs or begun or not free, "a wait that nothing ends"


def test_a_cap_keeps_a_block_to_its_average_and_the_threshold() -> None:
    """The first unit hardly scales and takes most of the time: the second asks for all cores, and a block that begins
    with it is not bounded."""
    steep = spans_of([[[[260, 400], [255, 200], [252, 133], [250, 100]]]], [[[0, 0]] * 4])
    side = Side([steep, steep], 4, target=0.875, slo=480)
    assert side.averages == [[3], [3]]
    beside = row(1, FIXED, 0, 480, 0, 1, end=2, since=0, due=400)  # both average 3: the threshold is 0
    jobs = [*row(0, PAUSED, 0, 480, 1, 0), *beside]
    free = side.blocks(ALGORITHM_2, list(jobs), 0, 3, replans=False)[0]
    capped = side.blocks(ALGORITHM_2, list(jobs), 0, 3, replans=False, capped=True)[0]
    assert (free[4], free[5]) == (3, 4), "it starts with what is free and wants all"
    assert (capped[4], capped[5]) == (3, 0)


def test_who_continues_keeps_its_own_cores_then_growers_then_the_queue() -> None:
    side = Side([even(4, 8)], 8, slo=1000)
    slow = row(0, RUNS, 0, 1000, 0, 2, end=4, wanted=4, since=100, due=1300)
    again = row(0, PAUSED, 0, 900, 2, 2)
    new = row(0, WAITS, 50, 1050)
    jobs = [*new, *slow, *again]
    made = side.blocks(2, jobs, 400, 6, replans=False)
    assert sorted((c[0], c[1]) for c in made) == [(0, START), (1, GROW), (2, START)]
    made.sort(key=lambda change: -change[0])
    averages = averages_of(side.dims, side.averages, jobs, 3, 0, 0.0)
    assert averages == 3 * side.averages[0][0]
    assert made[1][4] == 4
    assert sum(c[4] for c in made) - 2 == 6, "all free cores are given out"
    assert made[2][5] > made[2][4], "the last one wants more than was left"


def test_layers_go_by_slack_and_the_others_by_arrival() -> None:
    side = Side([even(3, 4)], 4, slo=2000)
    jobs = [*row(0, WAITS, 0, 2000), *row(0, WAITS, 10, 600)]
    assert [c[0] for c in side.blocks(1, list(jobs), 20, 1, by_slack=True)] == [1]
    assert [c[0] for c in side.blocks(ALGORITHM_2, list(jobs), 20, 1)] == [0]
    assert [c[0] for c in side.slack(list(jobs), 20, 1)] == [1]


def test_hopeless_jobs_are_given_up() -> None:
    side = Side([even(4, 2)], 2)
    late, good = row(0, WAITS, 0, 1500), row(0, WAITS, 0, 1900)
    for decide in (
        lambda jobs: side.blocks(ALGORITHM_2, jobs, 500, 2, drops=True),
        lambda jobs: side.slack(jobs, 500, 2, True),
    ):
        made = decide([*late, *good])
        assert made[0][:2] == [0, DROP]
        assert made[0][6] == 1200
        assert made[1][:2] == [1, START]


def test_ours_shares_the_cores_equally_and_gives_the_late_more() -> None:
    side = Side([even(40, 8, 840)], 8, target=0.9, slo=1_000_000)
    knobs = 0.9, 4200, 0.5, 1.3, 0.5
    alone = side.slack([*row(0, WAITS, 0, 1_000_000)], 0, 8, knobs=knobs)
    assert alone[0][4] == 8
    assert alone[0][2] == 40, "a block of the whole model, within the quantum"
    both = side.slack([*row(0, WAITS, 0, 1_000_000), *row(0, WAITS, 0, 1_000_000)], 0, 8, knobs=knobs)
    assert [c[4] for c in both] == [4, 4]
    assert both[0][2] == 20, "as long as the quantum on four cores"
    late = side.slack([*row(0, WAITS, 0, 5000), *row(0, WAITS, 0, 1_000_000)], 0, 8, knobs=knobs)
    assert late[0][4] == 8


def test_ours_waits_for_cores_that_come_soon_and_nobody_passes() -> None:
    side = Side([even(40, 8, 80)], 8, slo=100_000)
    runs = row(0, FIXED, 0, 100_000, 0, 7, end=4, since=0, due=50)
    jobs = [*runs, *row(0, WAITS, 0, 450), *row(0, WAITS, 0, 100_000)]
    assert side.slack(list(jobs), 10, 1) == []
    assert side.slack(list(jobs), 10, 1, knobs=(0.9, 800, 0.0, 1.3, 0.5))[0][:2] == [1, START]


def test_ours_gives_up_who_has_become_too_dear_while_others_wait() -> None:
    steep = spans_of([[[[300 * 4, 300 * 4], [900, 900], [800, 800], [750, 750]]]], [[[0, 0]] * 4])
    side = Side([steep], 4, target=0.9, slo=3000)
    jobs = [*row(0, WAITS, 0, 1700), *row(0, WAITS, 0, 3000)]
    made = side.slack(list(jobs), 0, 4, True, (1.0, 800, 0.5, 1.2, 0.5))
    assert made[0][:2] == [0, DROP]
    assert side.slack(jobs[:FIELDS], 0, 4, True, (1.0, 800, 0.5, 1.2, 0.5))[0][:2] == [0, START], "nobody else waits"


def test_who_has_begun_lets_others_pass_only_while_it_can_wait() -> None:
    side = Side([even(10, 1, 100)], 1, slo=10_000)
    knobs = 0.9, 800, 0.5, 3.0, 0.5
    for left, first in ((1501, 1), (1500, 0)):  # 500 ns are left to run, and 3 times as long is its patience
        jobs = [*row(0, PAUSED, 0, left, 5), *row(0, WAITS, 0, 1450)]
        assert side.slack(jobs, 0, 1, knobs=knobs)[0][:2] == [first, START]
    begun = [*row(0, PAUSED, 0, 1500, 5), *row(0, PAUSED, 0, 1400, 5), *row(0, PAUSED, 0, 1000, 9)]
    assert side.slack(begun, 0, 1, knobs=knobs)[0][0] == 1, "of two that must go on the earlier deadline"
    ranked = [*row(0, PAUSED, 0, 600, 5), *row(0, WAITS, 0, 9000, rank=LOW - 1)]
    assert side.slack(ranked, 0, 1, knobs=knobs)[0][0] == 1, "a priority goes before all"
