"""Pieces of a placement: as few as can be without anybody waiting for longer, run in the order of the plan."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.execute.threads.lanes import Lane
from cotenant.techniques.placement.execute.placed_tasks import PlacedTask, tasks_of
from cotenant.techniques.placement.execute.task_run import TaskRun
from cotenant.techniques.placement.plan.flat import PLAIN, PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.task_graph import TaskDevice
from cotenant.work import Share
from placed_samples import graph_of
from task_graphs import CORES, random_graph, random_plan

RANGES = {"a": range(1), "b": range(1, 2), "ab": range(2)}
THREE = tuple(TaskDevice(f"{at}", (), "host") for at in range(3))
THREE_RANGES = {"0": range(1), "1": range(1, 2), "2": range(2, 3), "01": range(2), "12": range(1, 3), "012": range(3)}
THREE_WIDE = (
    *THREE,
    *(TaskDevice(name, tuple(name), "host") for name in THREE_RANGES if len(name) > 1),
)


def pieces(problem: PlacementProblem, plan: TaskPlan, ranges: dict[str, range]) -> tuple[PlacedTask, ...]:
    return tasks_of(graph_of(problem), plan.order, [ranges[problem.device_names[d]] for d in plan.place])


def makespan(problem: PlacementProblem, plan: TaskPlan, made: tuple[PlacedTask, ...]) -> int:
    """When the last piece ends, if each starts when those that it waits for have ended."""
    waits, starts, ends = [p.dependency_count for p in made], [0] * len(made), {}
    ready = [at for at, count in enumerate(waits) if not count]
    while ready:
        at = ready.pop()
        ends[at] = starts[at] + sum(problem.service[unit][plan.place[unit]] for unit in made[at].units)
        for follower in made[at].followers:
            starts[follower] = max(starts[follower], ends[at])
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    assert len(ends) == len(made)
    return max(ends.values())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 24), st.sampled_from([(CORES, RANGES), (THREE_WIDE, THREE_RANGES)]))
def test_pieces_take_as_long_as_single_units_would(seed: int, size: int, world: Any) -> None:
    devices, ranges = world
    problem = PlacementProblem(random_graph(seed, size, devices, reach=8), PLAIN)
    plan = random_plan(problem, seed)
    made = pieces(problem, plan, ranges)
    line = problem.evaluate(plan)
    assert line is not None
    assert makespan(problem, plan, made) == line.makespan_ns
    assert sorted(unit for piece in made for unit in piece.units) == list(range(size))
    last: dict[range, PlacedTask] = {}
    for at, piece in enumerate(made):  # and each cut is there because of another device
        before = last.get(piece.cores)
        if before is not None:
            across = [p for p in made if at in p.followers and p.cores != piece.cores]
            assert across or any(made[follower].cores != piece.cores for follower in before.followers)
        last[piece.cores] = piece


def test_branches_of_a_fork_are_one_piece_each() -> None:
    problem = PlacementProblem(random_graph(0, 12, CORES, reach=1), PLAIN)
    dfg = graph_of(problem)
    assert len(tasks_of(dfg, range(12), [range(2)] * 12)) == 1
    assert [p.units for p in tasks_of(dfg, range(12), [range(2)] * 4 + [range(1)] * 8)] == [
        tuple(range(4)),
        tuple(range(4, 12)),
    ]


def test_an_order_that_cannot_be_is_refused() -> None:
    problem = PlacementProblem(random_graph(3, 6, CORES, reach=1), PLAIN)
    dfg = graph_of(problem)
    with pytest.raises(InvalidValueError, match="each of 6 units once"):
        tasks_of(dfg, [0, 1, 2, 3, 4, 4], [range(1)] * 6)
    with pytest.raises(InvalidValueError, match="behind what they read"):
        tasks_of(dfg, range(5, -1, -1), [range(1)] * 6)


class Crew:
    """Runs pieces that do nothing but say when they run, and where; some fail."""

    def __init__(self, made: tuple[PlacedTask, ...], failing: frozenset[int] = frozenset()) -> None:
        self.made, self.failing = made, failing
        self.running: set[int] = set()
        self.ran: list[int] = []
        self.threads: dict[int, set[int]] = {}
        self.stops = 0

    def execute(self, at: int, tensors: dict[str, Any]) -> None:
        piece = self.made[at]
        assert all(name in tensors for name in piece.inputs)
        for core in piece.cores:
            assert core not in self.running
            self.running.add(core)
        self.threads.setdefault(piece.cores[0], set()).add(threading.get_ident())
        self.ran.append(at)
        tensors.update(dict.fromkeys(piece.outputs, at))
        self.running.difference_update(piece.cores)
        if at in self.failing:
            raise ArithmeticError(at)

    def stop(self) -> None:
        self.stops += 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 24), st.data())
def test_runs_keep_the_order_drop_tensors_and_fail_once(seed: int, size: int, data: st.DataObject) -> None:
    problem = PlacementProblem(random_graph(seed, size, THREE_WIDE, reach=8), PLAIN)
    made = pieces(problem, random_plan(problem, seed), THREE_RANGES)
    ends = {tensor.name for tensor in graph_of(problem).outputs}
    failing = data.draw(st.frozensets(st.integers(0, len(made) - 1), max_size=2))
    lanes = {core: Lane(Share((core,))) for core in (1, 2)}
    try:
        for broken in (failing, frozenset()):  # a run that failed leaves nothing behind
            crew, tensors = Crew(made, broken), {}
            run = TaskRun(made, lanes, crew.execute, ends, crew.stop)
            if broken:
                with pytest.raises(ArithmeticError) as caught:
                    run.run(tensors)
                assert caught.value.args[0] in broken
                assert crew.stops == 1
            else:
                run.run(tensors)
                assert sorted(crew.ran) == list(range(len(made)))
                assert set(tensors) == ends
            place = {at: rank for rank, at in enumerate(crew.ran)}
            for at, piece in enumerate(made):
                assert all(place[at] < place[after] for after in piece.followers if after in place)
            assert all(len(threads) == 1 for threads in crew.threads.values())
            assert crew.threads.get(0, {threading.get_ident()}) == {threading.get_ident()}
    finally:
        for lane in lanes.values():
            lane.close()


def test_an_interrupted_run_ends_when_its_lanes_have() -> None:
    made = (
        PlacedTask(range(1, 2), (0,), (), ("x",), (1,), 0),
        PlacedTask(range(1, 2), (1,), ("x",), ("y",), (2,), 1),
        PlacedTask(range(1), (2,), ("y",), ("z",), (), 1),
    )
    ran, lane, stopped = [], Lane(Share((1,))), threading.Event()

    class Interrupted(SimpleQueue[int]):
        def get(self, block: bool = True, timeout: float | None = None) -> int:
            if not stopped.is_set():
                raise KeyboardInterrupt
            return super().get(block, timeout)

    def execute(at: int, tensors: dict[str, Any]) -> None:
        ran.append(at)
        stopped.wait()

    run = TaskRun(made, {1: lane}, execute, (), stopped.set)
    run._ready = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run.run({})
    assert ran in ([0], [])  # what had begun by then, and nothing else
    assert run._left == []
    lane.close()
