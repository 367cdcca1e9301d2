"""Decisions of the rules of blocks: what they give out, and in which order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from block_models import spans_of
from block_sides import LOW, Side, even, hold, idle_after, number_of, sides, slack_rules, starts_of
from cotenant.techniques.layer_blocks.policy.block_jobs import BlockExpansion, BlockStart, JobDrop
from cotenant.techniques.layer_blocks.policy.published import ALGORITHM_2

SOME = settings(max_examples=80, deadline=None, database=None)


@SOME
@given(
    sides(),
    st.sampled_from([ALGORITHM_2, 1, 2]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_decisions_of_blocks_hold(
    case: tuple, grain: int, by_slack: bool, capped: bool, replans: bool, drops: bool
) -> None:
    side, jobs, now, free = case
    blocks = side.sees(jobs, now, free, drops)
    made = side.decide(side.rules(grain, by_slack=by_slack, capped=capped, replans=replans), blocks)
    hold(blocks, made)
    if grain != ALGORITHM_2:
        for start in starts_of(made):
            assert start.end == min(start.job.model.units, start.job.unit + grain)
    changed = {number_of(change) for change in made}
    waiting = [job for job in blocks.ready if job.first not in changed]
    assert not idle_after(blocks, made) or not waiting, "a job waits beside a free lane"


@SOME
@given(sides(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_decisions_by_slack_hold(case: tuple, drops: bool, narrow: float) -> None:
    side, jobs, now, free = case
    blocks = side.sees(jobs, now, free, drops)
    made = side.decide(slack_rules(side.total, narrow), blocks)
    hold(blocks, made)
    begun = starts_of(made)
    assert all(start.wanted == 0 for start in begun), "it takes what it planned for"

    def presses(start: BlockStart) -> bool:
        model, job = start.job.model, start.job
        alone = sum(model.unit_ns(0, 0, side.total)[job.unit :])
        return job.has_begun and job.deadline_ns - now <= 1.3 * alone

    order = [(start.job.rank, not presses(start), start.job.deadline_ns) for start in begun]
    assert order == sorted(order), "by priority, then those that have begun and must go on, then by deadline"
    changed = {number_of(change) for change in made}
    waits = any(job.first not in changed for job in blocks.ready)
    assert not waits or blocks.running or begun or not free, "a wait that nothing ends"


def test_a_cap_keeps_a_block_to_its_average_and_the_threshold() -> None:
    """The first unit hardly scales and takes most of the time: the second asks for all cores, and a block that begins
    with it is not bounded."""
    steep = spans_of([[[[260, 400], [255, 200], [252, 133], [250, 100]]]], [[[0, 0]] * 4])
    side = Side([steep, steep], 4, target=0.875, slo=480)
    assert [model.averages for model in side.models] == [[3], [3]]
    beside = side.runs(1, 1, 480, 0, 2, 1, since=0, due=400)  # both average 3: the threshold is 0
    blocks = side.sees([side.paused(0, 0, 0, 480, 1), beside], 0, 3)
    (free,) = starts_of(side.decide(side.rules(replans=False), blocks))
    (capped,) = starts_of(side.decide(side.rules(replans=False, capped=True), blocks))
    assert (free.cores, free.wanted) == (3, 4), "it starts with what is free and wants all"
    assert (capped.cores, capped.wanted) == (3, 0)


def test_what_continues_keeps_its_own_cores_then_growing_blocks_then_the_queue() -> None:
    side = Side([even(4, 8)], 8, slo=1000)
    new = side.waits(0, 0, 50, 1050)
    slow = side.runs(1, 0, 1000, 0, 4, 2, since=100, due=1300, wanted=4)
    again = side.paused(2, 0, 0, 900, 2, 2)
    made = side.decide(side.rules(2, replans=False), side.sees([new, slow, again], 400, 6))
    assert sorted((number_of(c), type(c)) for c in made) == [(0, BlockStart), (1, BlockExpansion), (2, BlockStart)]
    last, expansion, first = sorted(made, key=number_of)
    assert made.index(expansion) < made.index(last)
    assert made.index(first) < made.index(last)
    assert (expansion.cores, first.cores + expansion.cores + last.cores - 2) == (4, 6), "all free cores are given out"
    assert isinstance(last, BlockStart)
    assert last.wanted > last.cores, "the last one wants more than was left"


def test_layers_go_by_slack_and_the_others_by_arrival() -> None:
    side = Side([even(3, 4)], 4, slo=2000)
    blocks = side.sees([side.waits(0, 0, 0, 2000), side.waits(1, 0, 10, 600)], 20, 1)
    assert [number_of(c) for c in side.decide(side.rules(1, by_slack=True), blocks)] == [1]
    assert [number_of(c) for c in side.decide(side.rules(), blocks)] == [0]
    assert [number_of(c) for c in side.decide(slack_rules(4), blocks)] == [1]


def test_hopeless_jobs_are_given_up() -> None:
    side = Side([even(4, 2)], 2)
    blocks = side.sees([side.waits(0, 0, 0, 1500), side.waits(1, 0, 0, 1900)], 500, 2, drops=True)
    for rules in (side.rules(), slack_rules(2)):
        drop, start = side.decide(rules, blocks)
        assert isinstance(drop, JobDrop)
        assert (drop.job.first, drop.needed_ns) == (0, 1200)
        assert isinstance(start, BlockStart)
        assert start.job.first == 1


def test_ours_shares_the_cores_equally_and_gives_the_late_more() -> None:
    side = Side([even(40, 8, 840)], 8, target=0.9, slo=1_000_000)
    rules, first, second = slack_rules(8), side.waits(0, 0, 0, 1_000_000), side.waits(1, 0, 0, 1_000_000)
    (alone,) = starts_of(side.decide(rules, side.sees([first], 0, 8), 4200))
    assert (alone.cores, alone.end) == (8, 40), "a block of the whole model, within the quantum"
    both = starts_of(side.decide(rules, side.sees([first, second], 0, 8), 4200))
    assert [start.cores for start in both] == [4, 4]
    assert both[0].end == 20, "as long as the quantum on four cores"
    late = starts_of(side.decide(rules, side.sees([side.waits(0, 0, 0, 5000), second], 0, 8), 4200))
    assert late[0].cores == 8


def test_ours_waits_for_cores_that_come_soon_and_no_job_passes() -> None:
    side = Side([even(40, 8, 80)], 8, slo=100_000)
    runs = side.runs(0, 0, 100_000, 0, 4, 7, since=0, due=50)
    blocks = side.sees([runs, side.waits(1, 0, 0, 450), side.waits(2, 0, 0, 100_000)], 10, 1)
    assert side.decide(slack_rules(8), blocks) == []
    assert [number_of(c) for c in starts_of(side.decide(slack_rules(8, narrow=0.0), blocks))] == [1]


def test_ours_gives_up_a_job_that_has_become_too_dear_while_others_wait() -> None:
    steep = spans_of([[[[300 * 4, 300 * 4], [900, 900], [800, 800], [750, 750]]]], [[[0, 0]] * 4])
    side = Side([steep], 4, target=0.9, slo=3000)
    dear, other, rules = side.waits(0, 0, 0, 1700), side.waits(1, 0, 0, 3000), slack_rules(4, target=1.0, patience=1.2)
    made = side.decide(rules, side.sees([dear, other], 0, 4, drops=True))
    assert isinstance(made[0], JobDrop)
    assert made[0].job is dear
    (alone,) = side.decide(rules, side.sees([dear], 0, 4, drops=True))
    assert isinstance(alone, BlockStart), "no other job waits"


def test_what_has_begun_lets_others_pass_only_while_it_can_wait() -> None:
    side = Side([even(10, 1, 100)], 1, slo=10_000)
    rules = slack_rules(1, patience=3.0)

    def chosen(*jobs: object) -> int:
        return number_of(side.decide(rules, side.sees(list(jobs), 0, 1))[0])

    for left, first in ((1501, 1), (1500, 0)):  # 500 ns are left to run, and 3 times as long is its patience
        assert chosen(side.paused(0, 0, 0, left, 5), side.waits(1, 0, 0, 1450)) == first
    begun = [side.paused(at, 0, 0, *rest) for at, rest in enumerate(((1500, 5), (1400, 5), (1000, 9)))]
    assert chosen(*begun) == 1, "of two that must go on the earlier deadline"
    ranked = side.paused(0, 0, 0, 600, 5), side.waits(1, 0, 0, 9000, rank=LOW - 1)
    assert chosen(*ranked) == 1, "a priority goes before all"
