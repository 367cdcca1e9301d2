"""Searches for joint plans against brute force and bounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.plan.granularity.bounds import bound_of
from cotenant.plan.granularity.moves import Moves, Window
from cotenant.plan.granularity.planner import JointProgress, Sequential, Streams
from cotenant.plan.granularity.published import JointObjective, Published
from cotenant.plan.granularity.search import JointSearch
from cotenant.predict.occupancy.evaluator import PLAIN, JointEvaluator
from cotenant.profile.joint_plan import Chunk, JointPlan
from kernel_sets import random_plan, random_rules, random_set


def all_barriers(plan: JointPlan) -> Iterator[JointPlan]:
    """With no barrier, one or two, everywhere."""
    yield plan
    for first in itertools.product(*(range(member.units + 1) for member in plan.members)):
        yield msgspec.structs.replace(plan, barriers=(first,))
        for second in itertools.product(*(range(a, m.units + 1) for a, m in zip(first, plan.members, strict=True))):
            yield msgspec.structs.replace(plan, barriers=(first, second))


def all_chunks(evaluator: JointEvaluator) -> Iterator[tuple[Chunk, ...]]:
    """No run of units cut, or one of each member, in two."""
    ways: list[list[Chunk | None]] = []
    for m, table in enumerate(evaluator.tables):
        runs = [
            (a, b) for start, end in table.runs_that_split() for a in range(start, end) for b in range(a + 1, end + 1)
        ]
        halves = [(rows, table.batch - rows) for rows in range(1, table.batch)]
        ways.append([None, *(Chunk(m, a, b, rows) for a, b in runs for rows in halves)])
    for chosen in itertools.product(*ways):
        yield tuple(chunk for chunk in chosen if chunk is not None)


def best_of_all(evaluator: JointEvaluator) -> float:
    """The least makespan with one chunk a member and two barriers."""
    plans = (
        plan
        for chunks in all_chunks(evaluator)
        for plan in all_barriers(msgspec.structs.replace(evaluator.streams, chunks=chunks))
    )
    return min(evaluator.cost(plan).makespan_ns for plan in plans)


@given(st.integers(0, 10_000))
@settings(max_examples=5)
def test_no_plan_is_below_the_bound_nor_below_what_brute_force_finds(seed: int) -> None:
    tables, rules = random_set(seed, 2, 2, 3), random_rules(seed)
    evaluator = JointEvaluator(tables, rules, PLAIN)
    best = best_of_all(evaluator)
    assert bound_of(tables, rules) <= best
    found = Published().find(tables, rules)
    assert found.makespan_ns >= best or len(found.plan.barriers) > 2 or len(found.plan.chunks) > 1
    assert found.makespan_ns <= evaluator.cost(evaluator.streams).makespan_ns


@given(st.integers(0, 100_000), st.integers(1, 3))
@settings(max_examples=60)
def test_random_plans_are_above_the_bound(seed: int, members: int) -> None:
    tables, rules = random_set(seed, members), random_rules(seed)
    cost = JointEvaluator(tables, rules, PLAIN).cost_if(random_plan(seed, tables))
    assert cost is None or bound_of(tables, rules) <= cost.makespan_ns


def test_the_parts_of_the_published_search() -> None:
    for seed in range(5):
        tables, rules = random_set(seed, 3, 10), random_rules(seed)
        spatial, temporal, both = (
            Published(*kind).find(tables, rules) for kind in ((True, False), (False, True), (True, True))
        )
        assert not spatial.plan.barriers
        assert not temporal.plan.chunks
        assert max(both.makespan_ns, spatial.makespan_ns, temporal.makespan_ns) <= both.streams_ns
        assert both.bound_ns <= both.makespan_ns
        evaluator = JointEvaluator(tables, rules, PLAIN)
        assert both.makespan_ns == pytest.approx(evaluator.cost(both.plan).makespan_ns)
        assert both.plan == both.alternatives[0]
        residue = Published(objective=JointObjective.RESIDUE).find(tables, rules)
        assert evaluator.cost(residue.plan).residue_ns <= evaluator.cost(evaluator.streams).residue_ns


def test_a_search_ends_when_it_is_told_and_keeps_what_it_has() -> None:
    tables, rules = random_set(3, 3, 12), random_rules(4)
    whole = Published().find(tables, rules)
    told: list[int] = []

    def few(evaluated: int, best_ns: float) -> bool:
        told.append(evaluated)
        return len(told) < 3

    def interrupt(evaluated: int, best_ns: float) -> bool:
        raise KeyboardInterrupt

    assert Published().find(tables, rules, few).evaluated == 48
    assert Published().find(tables, rules, interrupt).evaluated == 16
    assert Published(rounds=20).find(tables, rules).evaluated == 20
    assert whole.makespan_ns <= Published(rounds=20).find(tables, rules).makespan_ns


def test_streams_and_sequential_are_plans_too() -> None:
    tables, rules = random_set(5, 3, 6), random_rules(6)
    streams, turn = Streams().find(tables, rules), Sequential().find(tables, rules)
    assert streams.makespan_ns == streams.streams_ns == turn.streams_ns
    assert turn.makespan_ns >= turn.sequential_ns * 0.99
    assert len(turn.plan.waits) == 2
    with pytest.raises(InvalidValueError, match="at least one"):
        Streams().find((), rules)


def test_ours_is_as_good_as_brute_force_finds() -> None:
    misses = 0
    for seed in range(12):
        tables, rules = random_set(seed, 2, 2 + seed % 2, 3), random_rules(seed)
        evaluator = JointEvaluator(tables, rules)
        best = best_of_all(evaluator)
        ours = JointSearch(evaluations=600, beliefs=0).find(tables, rules)
        assert bound_of(tables, rules) == ours.bound_ns <= ours.makespan_ns <= 1.03 * best
        misses += ours.makespan_ns > best * (1 + 1e-9)
    assert misses <= 1


@given(st.integers(0, 100_000), st.integers(1, 3), st.integers(40, 700))
@settings(max_examples=20)
def test_ours_is_never_worse_as_believed_than_streams_and_the_published_plan(
    seed: int, members: int, evaluations: int
) -> None:
    tables, rules = random_set(seed, members, 8), random_rules(seed)
    evaluator = JointEvaluator(tables, rules)
    published = Published(rounds=evaluations // 4).find(tables, rules)
    ours = JointSearch(evaluations=evaluations).find(tables, rules)
    assert ours.bound_ns <= ours.makespan_ns <= min(ours.streams_ns, published.makespan_ns) * (1 + 1e-9)
    assert ours.makespan_ns == pytest.approx(evaluator.cost(ours.plan).makespan_ns)
    assert ours.evaluated <= evaluations + 100
    assert all(evaluator.cost_if(plan) is not None for plan in ours.alternatives)
    assert len(set(ours.alternatives)) == len(ours.alternatives) <= 5


def test_the_same_seed_gives_the_same_plan_and_another_may_give_another() -> None:
    tables, rules = random_set(7, 3, 12), random_rules(8)
    found = [JointSearch(evaluations=400, seed=seed).find(tables, rules) for seed in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[0].alternatives != found[2].alternatives


def test_ours_ends_when_it_is_told_and_keeps_what_it_has() -> None:
    tables, rules = random_set(3, 3, 12), random_rules(5)
    told: list[tuple[int, float]] = []

    def stop_at(count: int) -> JointProgress:
        def progress(evaluated: int, best_ns: float) -> bool:
            told.append((evaluated, best_ns))
            return evaluated < count

        return progress

    def interrupt_at(count: int) -> JointProgress:
        def progress(evaluated: int, best_ns: float) -> bool:
            if evaluated > count:
                raise KeyboardInterrupt
            return True

        return progress

    for count in (16, 300):
        ours = JointSearch(evaluations=3000).find(tables, rules, stop_at(count))
        assert ours.evaluated <= count + 100
        assert ours.makespan_ns <= ours.streams_ns
    for count in (30, 1500):
        interrupted = JointSearch(evaluations=3000).find(tables, rules, interrupt_at(count))
        assert interrupted.evaluated <= count + 100
        assert interrupted.makespan_ns <= interrupted.streams_ns
    assert all(best > 0 for _, best in told)


def test_every_move_gives_a_plan_of_the_set() -> None:
    rng = random.Random(0)
    made = dict.fromkeys(["add_chunk", "change_chunk", "add_wait", "change_wait", "change_rank", "change_barrier"], 0)
    for seed in range(30):
        tables = random_set(seed, 3, 10)
        evaluator, moves = JointEvaluator(tables, random_rules(seed), PLAIN), Moves(tables, rng)
        plan = evaluator.streams
        for _ in range(40):
            window = Window.of(*evaluator.spans(plan), rng)
            kind = rng.choice(moves.kinds)
            other = kind(plan, window)
            if other is None or evaluator.cost_if(other) is None:
                continue
            made[kind.__name__] += other != plan
            assert other.members[0].units == plan.members[0].units
            plan = moves.stripped(other, window) if rng.random() < 0.1 else other
    assert min(made.values()) > 5
