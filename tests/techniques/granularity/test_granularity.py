"""Searches for joint plans against brute force and bounds."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.gacer._joint_run import JointWorld
from bench.papers.gacer._kernel_world import Admission, KernelDevice
from cotenant.errors import InvalidValueError
from cotenant.techniques.granularity.joint_plan import Chunk, JointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.plan.joint_bound import bound_of
from cotenant.techniques.granularity.plan.joint_search import JointSearch
from cotenant.techniques.granularity.plan.lane_tables import lane_rules, lane_table
from cotenant.techniques.granularity.plan.plan_moves import Moves, Window
from cotenant.techniques.granularity.plan.planner import JointProgress, SequentialMembers, Streams
from cotenant.techniques.granularity.plan.published import JointObjective, Published
from cotenant.techniques.granularity.predict.evaluator import PLAIN, JointEvaluator
from cotenant.techniques.granularity.predict.rules import Occupancy
from cotenant.types import Tenant
from kernel_sets import random_plan, random_rules, random_set, with_long_steps


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
        runs = [pair for run in table.splits for pair in itertools.combinations(run, 2)]
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
    costs = (evaluator.cost_if(plan) for plan in plans)
    return min(cost.makespan_ns for cost in costs if cost is not None)


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


def test_the_bound_is_not_above_by_a_rounding() -> None:
    tables, rules = random_set(14383, 1), random_rules(14383)
    assert bound_of(tables, rules) <= JointEvaluator(tables, rules, PLAIN).cost(random_plan(14383, tables)).makespan_ns


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
    streams, turn = Streams().find(tables, rules), SequentialMembers().find(tables, rules)
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
        tables = with_long_steps(seed, tables) if seed % 2 else tables
        evaluator, moves = JointEvaluator(tables, random_rules(seed), PLAIN), Moves(tables, rng)
        plan = evaluator.streams
        for _ in range(40):
            window = Window.of(*evaluator.spans(plan), rng)
            kind = rng.choice(moves.kinds)
            other = kind(plan, window)
            if other is None:
                continue
            assert all(tables[each.member].may_split(each.start, each.end) for each in other.chunks)
            if evaluator.cost_if(other) is None:
                continue
            made[kind.__name__] += other != plan
            assert other.members[0].units == plan.members[0].units
            plan = moves.stripped(other, window) if rng.random() < 0.1 else other
    assert min(made.values()) > 5


# --- steps of several units -------------------------------------------------------------------------------------------


def refused(plan: JointPlan, tables: Sequence[KernelTable]) -> list[tuple[int, int]]:
    """What a tenant would not run for a part of its rows, of all that a plan stops and cuts."""
    found = []
    for m, table in enumerate(tables):
        tenant = Tenant(table.model, 1, (0, table.size), table.batch, splits=table.splits)
        found += [part for part in plan.chunk_segments(m) if not tenant.may_split(*part)]
    return found


@given(st.integers(0, 100_000), st.integers(1, 3))
@settings(max_examples=20)
def test_what_searches_cut_may_be_cut(seed: int, members: int) -> None:
    """Chunks begin, are stopped by pointers, and end where a tenant lets them."""
    tables, rules = with_long_steps(seed, random_set(seed, members, 10)), random_rules(seed)
    world, bound = JointWorld(tables, KernelDevice(Admission.IN_ORDER, 0)), bound_of(tables, rules)
    for planner in (Published(rounds=150), JointSearch(evaluations=250, rounds=100)):
        found = planner.find(tables, rules)
        assert bound <= found.makespan_ns <= found.streams_ns
        for plan in (found.plan, *found.alternatives):
            assert refused(plan, tables) == []
            world.run(plan)  # which refuses them, too


@given(st.integers(0, 100_000))
@settings(max_examples=60)
def test_a_plan_is_judged_where_its_chunks_may_be_left_and_nowhere_else(seed: int) -> None:
    tables, rules = with_long_steps(seed, random_set(seed, 2, 8)), random_rules(seed)
    plan = random_plan(seed, tables)
    circles = msgspec.structs.replace(plan, chunks=())
    evaluator = JointEvaluator(tables, rules, PLAIN)
    goes_round = evaluator.cost_if(circles) is None
    assert (evaluator.cost_if(plan) is None) == (goes_round or bool(refused(plan, tables)))


def test_units_that_split_together_alone_are_cut_as_one() -> None:
    """As those of the attention in BERT as ONNX, which otherwise divide the model into short runs."""
    duration = np.outer([1e6] * 6, [0.25, 0.5, 0.75, 1])
    none, step = (lane_table("a", "123456", duration, 2, splits) for splits in ((), ((0, 6),)))
    other, rules = lane_table("b", "1", np.array([[1e5]]), 2, ()), lane_rules(0)
    for planner in (Published(rounds=200), JointSearch(evaluations=400)):
        assert planner.find([none, other], rules).plan.chunks == ()
    ours = JointSearch(evaluations=400).find([step, other], rules)
    assert [(chunk.start, chunk.end) for chunk in ours.plan.chunks] == [(0, 6)]
    assert bound_of([step, other], rules) <= ours.makespan_ns < 0.6 * ours.streams_ns
    wide = dataclasses.replace(step, need=np.outer([0.6, 1, 1, 1, 1, 1], [0.25, 0.5, 0.75, 1]))
    beside = dataclasses.replace(lane_table("c", "12", np.array([[4e6]] * 2), 2, ()), need=np.full((2, 1), 0.5))
    published = Published(temporal=False).find([beside, wide], Occupancy(0, 0, 0, 0))
    assert published.plan.chunks == (Chunk(1, 0, 6, (2, 2)),), "what fits is what fits for all of them"
    assert published.makespan_ns == 8e6


@pytest.mark.parametrize("splits", [((0,),), ((0, 2, 1),), ((0, 9),), ((0, 2), (1, 3)), ((-1, 1),)])
def test_runs_that_are_none_are_refused(splits: tuple[tuple[int, ...], ...]) -> None:
    [table] = random_set(0, 1, 6)
    table = dataclasses.replace(table, splits=())
    assert table.size >= 3
    with pytest.raises(InvalidValueError, match="splits"):
        dataclasses.replace(table, splits=splits)
