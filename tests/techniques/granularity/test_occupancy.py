"""The evaluator of joint plans: by hand, by a second one written another way, compiled as plain."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.fair_share import fair_shares
from cotenant.inner_loop import best_loops, has_compiler
from cotenant.techniques.granularity.joint_plan import Chunk, JointPlan, Wait
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.techniques.granularity.predict import cluster_loop
from cotenant.techniques.granularity.predict.cluster_loop import MAX_CHUNKS, level
from cotenant.techniques.granularity.predict.evaluator import PLAIN, JointEvaluator
from cotenant.techniques.granularity.predict.rules import Admission, Issuing, Occupancy
from kernel_sets import random_plan, random_rules, random_set

FREE = Occupancy(0, 0, 0, 0)


def table(name: str, *units: tuple[float, float], batch: int = 1, **shares: float) -> KernelTable:
    """Units of (us, need), the same for all rows but for a need that falls with them."""
    shape = (len(units), batch)
    rows = np.arange(1, batch + 1) / batch
    return KernelTable(
        name,
        batch,
        tuple(f"{name}{i}" for i in range(len(units))),
        np.array([[us * 1000.0] * batch for us, _ in units]) * rows,
        np.array([[need] for _, need in units]) * rows,
        np.full(shape, shares.get("compute", 0.0)),
        np.full(shape, shares.get("bandwidth", 0.0)),
        np.zeros(len(units)),
        (tuple(range(len(units) + 1)),),
    )


def us(tables: list[KernelTable], rules: Occupancy, **plan: object) -> float:
    evaluator = JointEvaluator(tables, rules, PLAIN)
    return evaluator.cost(msgspec.structs.replace(evaluator.streams, **plan)).makespan_ns / 1000


def test_a_unit_waits_until_its_whole_need_is_free_or_fills_what_is() -> None:
    tables = [table("a", (10, 0.6)), table("b", (10, 0.6)), table("c", (4, 0.4))]
    assert us(tables, FREE) == 20  # c goes beside a, b behind it
    assert us(tables, dataclasses.replace(FREE, admission=Admission.FILL)) == pytest.approx(14)
    # b has 0.4 of the slots until 10, and c what is left then


def test_operations_and_bytes_are_shared_max_min() -> None:
    tables = [table("a", (10, 0.2), bandwidth=0.8), table("b", (10, 0.2), bandwidth=0.4), table("c", (9, 0.2))]
    # b asks for less than half and gets it, a gets 0.6 of 0.8
    assert us(tables, FREE) == pytest.approx(10 + (10 - 7.5))
    assert us(tables, dataclasses.replace(FREE, shares_rates=False)) == 10


def test_launches_are_issued_by_the_threads_that_there_are() -> None:
    tables = [table("a", (1, 0.1), (1, 0.1)), table("b", (1, 0.1), (1, 0.1))]
    rules = dataclasses.replace(FREE, launch_ns=5000, gap_ns=500)
    assert us(tables, rules) == 11
    assert us(tables, dataclasses.replace(rules, issuing=Issuing.ALL)) == 21
    quick = dataclasses.replace(rules, launch_ns=100)
    assert us(tables, quick) == pytest.approx(0.1 + 1 + 0.5 + 1)


def test_barriers_waits_and_ranks_cost_and_order() -> None:
    tables = [table("a", (10, 0.6), (10, 0.3)), table("b", (10, 0.6), (10, 0.3))]
    rules = dataclasses.replace(FREE, barrier_ns=2000, event_ns=1000)
    assert us(tables, rules) == 30
    assert us(tables, rules, barriers=((1, 0),)) == 10 + 2 + 20
    assert us(tables, rules, waits=(Wait(1, 0, 0, 1),)) == 10 + 1 + 20
    members = JointEvaluator(tables, rules, PLAIN).streams.members
    first = (msgspec.structs.replace(members[0], rank=1), members[1])
    line = JointEvaluator(tables, rules, PLAIN).timeline(JointPlan(first))
    assert [run.member for run in line.runs] == [1, 0, 1, 0]
    with pytest.raises(InvalidValueError, match="circular"):
        us(tables, rules, waits=(Wait(0, 0, 1, 2), Wait(1, 0, 0, 2)))


def test_parts_of_a_chunk_run_beside_each_other_and_are_joined() -> None:
    a = dataclasses.replace(table("a", (8, 1.0), (8, 1.0), (8, 1.0), batch=4), join_ns=np.full(3, 3000.0))
    rules = dataclasses.replace(FREE, event_ns=1000)
    evaluator = JointEvaluator([a], rules, PLAIN)
    plan = msgspec.structs.replace(evaluator.streams, chunks=(Chunk(0, 1, 2, (2, 2)),))
    line = evaluator.timeline(plan)
    assert line.makespan_ns == 8000 + (1000 + 4000) + (1000 + 3000) + 8000
    assert [(run.unit, run.chunk, run.rows) for run in line.runs] == [(0, 0, 4), (1, 0, 2), (1, 1, 2), (2, 0, 4)]
    fixed = JointEvaluator([dataclasses.replace(a, splits=((0, 1), (2, 3)))], rules, PLAIN)
    with pytest.raises(InvalidValueError, match="row-wise units"):
        fixed.cost(plan)


def test_a_lane_is_kept_until_a_pointer() -> None:
    tables = [table(name, (4, 0.5), (4, 0.5)) for name in "abc"]
    rules = dataclasses.replace(FREE, keeps_slots=True, gap_ns=100)
    line = JointEvaluator(tables, rules, PLAIN).timeline(JointEvaluator(tables, rules, PLAIN).streams)
    assert [run.member for run in line.runs] == [0, 1, 0, 1, 2, 2]
    assert line.makespan_ns == 2 * 8100
    given = us(tables, rules, waits=(Wait(0, 1, 1, 1),))
    assert given == pytest.approx(4 + 8.1)  # a waits, and c comes in between


def test_residue_is_what_slots_are_idle_and_absent_members_are_empty() -> None:
    tables = [table("a", (10, 0.6)), table("b", (10, 0.2), (10, 0.2))]
    rules = dataclasses.replace(FREE, barrier_ns=2000)
    evaluator = JointEvaluator(tables, rules, PLAIN)
    plan = msgspec.structs.replace(evaluator.streams, barriers=((1, 1),), waits=(Wait(1, 1, 0, 1),))
    assert evaluator.cost(plan).residue_ns == pytest.approx(22_000 - 6000 - 4000)
    line = evaluator.timeline(plan)
    assert (line.makespan_ns, line.barriers_ns) == (22_000, (12_000,))
    assert line.residue_ns == pytest.approx(12_000)
    alone = evaluator.timeline(plan, absent=(0,))
    assert [run.start_ns for run in alone.runs] == [0, 12_000]
    assert evaluator.sequential_ns() == 30_000
    with pytest.raises(InvalidValueError, match="members"):
        JointEvaluator(tables[:1], rules, PLAIN).cost(plan)


# --- a second evaluator: tasks and what they wait for, in exact numbers -------------------------------------------


class Task:
    def __init__(self, m: int, u: int, k: int, rows: int, rank: int, before: list[tuple[Task, int]]) -> None:
        self.m, self.u, self.k, self.rows, self.rank, self.before = m, u, k, rows, rank, before
        self.issued = Fraction(0)
        self.begin: Fraction | None = None
        self.end: Fraction | None = None
        self.follows: Task | None = None  # in the same strand, keeping its slots

    @property
    def ready(self) -> Fraction | None:
        if any(task.end is None for task, _ in self.before):
            return None
        return max([self.issued, *(task.end + lag for task, lag in self.before if task.end is not None)])


def cluster_tasks(
    tables: list[KernelTable], rules: Occupancy, plan: JointPlan, lo: list[int], hi: list[int]
) -> list[Task]:
    made: dict[tuple[int, int], list[Task]] = {}
    for m, each in enumerate(tables):
        previous: list[Task] = []
        behind = None
        for u in range(lo[m], hi[m]):
            chunk = next((c for c in plan.chunks if c.member == m and c.start <= u < c.end), None)
            rows = chunk.rows if chunk else (each.batch,)
            tasks = [Task(m, u, k, r, plan.members[m].rank, []) for k, r in enumerate(rows)]
            for k, task in enumerate(tasks):
                if chunk and chunk is behind:
                    task.before.append((previous[k], rules.gap_ns))
                    task.follows = previous[k]
                elif previous:
                    joins = behind is not None
                    lag = rules.gap_ns + (rules.event_ns if k else 0)
                    if joins:
                        lag += rules.event_ns + int(each.join_ns[u - 1])
                    task.before += [(last, lag) for last in previous]
                    task.follows = previous[0] if not joins and not chunk else None
            made[m, u] = previous = tasks
            behind = chunk
    for m, u in list(made):
        for wait in plan.waits:
            if (wait.member, wait.unit) == (m, u) and wait.after_unit > lo[wait.after]:
                awaited = made.get((wait.after, wait.after_unit - 1))
                for task in made[m, u]:
                    if awaited is None:
                        task.before.append((Task(0, 0, 0, 0, 0, []), 0))  # never ends
                    else:
                        task.before += [(last, rules.event_ns) for last in awaited]
                    task.follows = None
    if rules.issuing is Issuing.STREAM:
        for (m, u), tasks in made.items():
            for task in tasks:
                task.issued = Fraction((u - lo[m] + 1) * rules.launch_ns)
    else:
        members = range(len(tables))
        turns = [[m] for m in members] if rules.issuing is Issuing.MEMBER else [list(members)]
        for turn in turns:
            spent = Fraction(0)
            for step in range(max(size.size for size in tables)):
                for m in turn:
                    for task in made.get((m, lo[m] + step), []):
                        spent += rules.launch_ns
                        task.issued = spent
    return [task for tasks in made.values() for task in tasks]


def max_min(demands: dict[Task, Fraction]) -> dict[Task, Fraction]:
    """What each may use of one: the least demands first."""
    left, given_to = Fraction(1), {}
    for count, task in enumerate(sorted(demands, key=demands.__getitem__)):
        given_to[task] = min(demands[task], left / (len(demands) - count))
        left -= given_to[task]
    return given_to


def cluster_ns(
    tables: list[KernelTable], rules: Occupancy, plan: JointPlan, lo: list[int], hi: list[int]
) -> Fraction | None:
    tasks = cluster_tasks(tables, rules, plan, lo, hi)
    value = {
        task: {
            name: Fraction(getattr(tables[task.m], name)[task.u, task.rows - 1])
            for name in ("duration_ns", "need", "compute", "bandwidth")
        }
        for task in tasks
    }
    left = {task: value[task]["duration_ns"] for task in tasks}
    need = {task: min(Fraction(1), value[task]["need"]) for task in tasks}
    now, ends = Fraction(0), [Fraction(0)]
    while any(task.end is None for task in tasks):
        waiting = [task for task in tasks if task.end is None and task.ready is not None and task.ready <= now]
        waiting.sort(key=lambda task: (task.rank, task.ready, task.m, task.k))
        speed: dict[Task, Fraction] = {}
        if rules.admission is Admission.FILL:
            free = Fraction(1)
            for task in waiting:
                speed[task] = min(need[task], free) / need[task]
                free -= min(need[task], free)
        else:
            for task in waiting:
                keeps = rules.keeps_slots and task.follows is not None
                if keeps and task.begin is None:
                    need[task] = need[task.follows]
                others = [other for other in tasks if other.begin is not None and other.end is None]
                if rules.keeps_slots:
                    others += [x.follows for x in tasks if x.follows and x.follows.end is not None and x.begin is None]
                if task.begin is None and (keeps or sum(need[other] for other in others) + need[task] <= 1):
                    task.begin = now
            speed = {task: Fraction(1) for task in tasks if task.begin is not None and task.end is None}
        full = dict(speed)
        if rules.shares_rates:
            for name in ("compute", "bandwidth"):
                request = {task: value[task][name] * full[task] for task in speed if value[task][name] * full[task] > 0}
                if sum(request.values()) > 1:
                    for task, gets in max_min(request).items():
                        speed[task] = min(speed[task], gets / value[task][name])
        steps = [left[task] / rate for task, rate in speed.items() if rate > 0]
        steps += [
            task.ready - now for task in tasks if task.end is None and task.ready is not None and task.ready > now
        ]
        if not steps:
            return None
        step = min(steps)
        now += step
        for task, rate in speed.items():
            left[task] -= rate * step
            if left[task] == 0:
                task.end = now
                chunk = next((c for c in plan.chunks if c.member == task.m and c.end == task.u + 1), None)
                joins = rules.event_ns + int(tables[task.m].join_ns[task.u]) if chunk else 0
                ends.append(now + joins)
    return max(ends)


def reference_ns(tables: list[KernelTable], rules: Occupancy, plan: JointPlan) -> Fraction | None:
    total = Fraction(len(plan.barriers) * rules.barrier_ns)
    lo = [0] * len(tables)
    for hi in (*plan.barriers, tuple(each.size for each in tables)):
        taken = cluster_ns(tables, rules, plan, lo, list(hi))
        if taken is None:
            return None
        total += taken
        lo = list(hi)
    return total


@given(st.integers(0, 100_000), st.integers(1, 3))
@settings(max_examples=150)
def test_it_gives_what_an_exact_one_gives(seed: int, members: int) -> None:
    tables, rules = random_set(seed, members), random_rules(seed)
    plan = random_plan(seed, tables)
    evaluator = JointEvaluator(tables, rules, PLAIN)
    expected = reference_ns(list(tables), rules, plan)
    found = evaluator.cost_if(plan)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.makespan_ns == pytest.approx(float(expected), abs=1)
        line = evaluator.timeline(plan)
        assert line.makespan_ns == pytest.approx(found.makespan_ns, abs=1)
        assert line.residue_ns == pytest.approx(found.residue_ns, abs=1)
        assert len(line.runs) == sum(
            len(next((c.rows for c in plan.chunks if c.member == m and c.start <= u < c.end), (0,)))
            for m, each in enumerate(tables)
            for u in range(each.size)
        )


@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.1, 1.0)), min_size=2, max_size=6))
def test_the_inner_loop_shares_rates_max_min(drawn: list[tuple[float, float]]) -> None:
    """`level` is the same sharing in the form that the inner loop needs: the largest share alone."""
    request = [demand * speed for demand, speed in drawn]
    assume(sum(request) > 1 + 1e-6)
    evaluator = JointEvaluator([table(str(n), (1, 0.1)) for n in range(len(drawn))], FREE, PLAIN)
    scratch = evaluator._scratch
    for n, (_, speed) in enumerate(drawn):
        scratch.live[n] = n * MAX_CHUNKS
        scratch.rate[n * MAX_CHUNKS] = speed
    demand = [0.0] * (len(drawn) * MAX_CHUNKS)
    demand[::MAX_CHUNKS] = [each for each, _ in drawn]
    most = level(scratch, demand, len(drawn))
    shares = fair_shares(request, [1] * len(request), 1.0)
    assert [min(each, most) for each in request] == pytest.approx(shares, rel=1e-6)


@pytest.mark.skipif(not has_compiler(), reason="numba is not installed")
def test_compiled_loops_do_what_plain_ones_do() -> None:
    for seed in range(60):
        tables, rules = random_set(seed), random_rules(seed)
        plan = random_plan(seed, tables)
        costs = [JointEvaluator(tables, rules, loops).cost_if(plan) for loops in (PLAIN, best_loops(cluster_loop))]
        assert costs[0] == costs[1]
