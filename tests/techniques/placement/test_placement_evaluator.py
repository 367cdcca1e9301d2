"""The evaluator of placements: by hand, by a second one written another way, and compiled as plain."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.inner_loop import compiled_loops, has_compiler
from cotenant.profiles.profile_file import ProfileError
from cotenant.techniques.placement.plan import annealing
from cotenant.techniques.placement.plan.contract import contract
from cotenant.techniques.placement.plan.flat import LOOPS, PLAIN, PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.placed_units import placement_of, plan_of
from cotenant.techniques.placement.plan.plan_loop import IMPOSSIBLE, UNIT, FlatTaskPlan
from cotenant.techniques.placement.plan.task_graph import (
    DeviceLink,
    GraphTask,
    TaskDevice,
    TaskGraph,
    TransferMode,
)
from cotenant.techniques.placement.plan.window import look, survey
from cotenant.techniques.placement.task_profile import UnitTensor
from task_graphs import CORES, GPU_CPU, random_graph, random_plan

MODES = tuple(TransferMode)


def fork(transfers: TransferMode, hand_over_ns: int = 0) -> TaskGraph:
    """A source on the GPU whose tensor three tasks read; a copy takes 20 ns."""
    tasks = [GraphTask(name, {"gpu": 100, "cpu": 150}) for name in ("source", "one", "two", "three")]
    tensor = UnitTensor("x", 0, (1, 2, 3), 10)
    links = (DeviceLink("gpu", "cpu", 1e9, 10), DeviceLink("cpu", "gpu", 1e9, 10))
    return TaskGraph(GPU_CPU, tuple(tasks), (tensor,), links, {}, hand_over_ns, transfers)


@pytest.mark.parametrize(
    ("transfers", "busy"),
    [
        (TransferMode.DELAY, (200, 300)),
        (TransferMode.ENGINE, (200, 300, 20, 0)),
        (TransferMode.LANE, (220, 300)),
    ],
)
def test_a_tensor_is_copied_once_however_many_read_it(transfers: TransferMode, busy: tuple[int, ...]) -> None:
    problem = PlacementProblem(fork(transfers), PLAIN)
    line = problem.evaluate(TaskPlan((0, 1, 1, 0), (0, 1, 2, 3)))
    assert line is not None
    assert line.start_ns == (0, 120, 270, 120 if transfers is TransferMode.LANE else 100)
    assert line.makespan_ns == 420
    assert line.busy_ns == busy
    assert line.period_ns == 300


def test_hand_overs_take_the_lane_of_the_reader_once() -> None:
    line = PlacementProblem(fork(TransferMode.DELAY, 7), PLAIN).evaluate(TaskPlan((0, 1, 1, 0), (0, 3, 1, 2)))
    assert line is not None
    assert line.end_ns == (100, 277, 434, 200)
    assert line.busy_ns == (200, 314)


def test_a_moldable_device_excludes_its_lanes_and_they_it() -> None:
    tasks = tuple(GraphTask(name, {"a": 10, "b": 10, "ab": 6}) for name in "pqr")
    problem = PlacementProblem(TaskGraph(CORES, tasks, ()), PLAIN)
    line = problem.evaluate(TaskPlan((0, 2, 1), (0, 1, 2)))
    assert line is not None
    assert line.start_ns == (0, 10, 16)
    line = problem.evaluate(TaskPlan((0, 2, 1), (0, 2, 1)))
    assert line is not None
    assert line.start_ns == (0, 10, 0)
    assert line.busy_ns == (16, 16)


def test_spaces_without_a_link_exchange_nothing() -> None:
    graph = fork(TransferMode.DELAY)
    problem = PlacementProblem(TaskGraph(graph.devices, graph.tasks, graph.tensors), PLAIN)
    assert problem.evaluate(TaskPlan((0, 1, 0, 0), (0, 1, 2, 3))) is None
    assert problem.evaluate(TaskPlan((1, 1, 1, 1), (0, 1, 2, 3))) is not None


def slow_makespan(problem: PlacementProblem, plan: TaskPlan) -> int:
    """DELAY by definition: a task starts when its inputs are there and all before it on its lanes have ended."""
    end: dict[int, int] = {}
    graph = problem.graph
    for at, i in enumerate(plan.order):
        mine = set(problem.lanes[plan.place[i]])
        begin = max((end[j] for j in plan.order[:at] if mine & set(problem.lanes[plan.place[j]])), default=0)
        hand = 0
        for t in problem.inputs[i]:
            j = problem.producer[t]
            begin = max(begin, end[j] + problem.copy_ns(t, problem.space[plan.place[j]], problem.space[plan.place[i]]))
            hand = graph.hand_over_ns if plan.place[j] != plan.place[i] else hand
        end[i] = begin + hand + problem.service[i][plan.place[i]]
    return max(end.values())


@given(st.integers(0, 10_000), st.integers(1, 20), st.booleans(), st.sampled_from((0, 300)))
@settings(max_examples=60)
def test_the_evaluator_does_what_its_definition_says(seed: int, size: int, has_cores: bool, hand: int) -> None:
    problem = PlacementProblem(random_graph(seed, size, CORES if has_cores else GPU_CPU, hand_over_ns=hand), PLAIN)
    plan = random_plan(problem, seed)
    line = problem.evaluate(plan)
    assert line is not None
    assert line.makespan_ns == slow_makespan(problem, plan)


@pytest.mark.parametrize("mode", MODES)
def test_every_window_of_a_plan_costs_what_it_does(mode: TransferMode) -> None:
    """Also where copies take turns behind the window."""
    for seed, size in itertools.product(range(40), (5, 8)):
        problem = PlacementProblem(random_graph(seed, size, transfers=mode, hand_over_ns=100 * (seed % 3)), PLAIN)
        plan = random_plan(problem, seed)
        order, place, position = list(plan.order), list(plan.place), [0] * size
        for at, i in enumerate(order):
            position[i] = at
        for low, high in itertools.combinations(range(size + 1), 2):
            survey(problem.flat, problem.scratch, problem.view, order, place, position, low, high)
            g, w, v = problem.flat, problem.scratch, problem.view
            cost = look(g, w, v, order, place, IMPOSSIBLE, [UNIT, 0, 0, 0, -1], [0, 0])
            assert cost == makespan(problem, order, place)


@given(st.integers(0, 10_000), st.integers(2, 40), st.sampled_from(MODES), st.data())
@settings(max_examples=60)
def test_a_window_costs_what_the_whole_plan_does(seed: int, size: int, mode: TransferMode, data: st.DataObject) -> None:
    """Exactly under DELAY; under the others for the plan that was surveyed."""
    problem = PlacementProblem(random_graph(seed, size, transfers=mode), PLAIN)
    plan = random_plan(problem, seed)
    low = data.draw(st.integers(0, size - 1))
    high = data.draw(st.integers(low + 1, size))
    g, w, v = problem.flat, problem.scratch, problem.view
    order, place, position = list(plan.order), list(plan.place), [0] * size
    for at, i in enumerate(order):
        position[i] = at
    survey(g, w, v, order, place, position, low, high)
    for at in range(low, high) if mode is TransferMode.DELAY else ():
        place[order[at]] = data.draw(st.integers(0, 1))
    used = [0] * len(problem.space_names)
    assert look(g, w, v, order, place, IMPOSSIBLE, [UNIT, 0, 0, 0, -1], used) == makespan(problem, order, place)
    assert look(g, w, v, order, place, IMPOSSIBLE, [0, UNIT, 0, 0, -1], used) == period(problem, order, place)


def makespan(problem: PlacementProblem, order: list[int], place: list[int]) -> int:
    line = problem.evaluate(TaskPlan(tuple(place), tuple(order)))
    assert line is not None
    return line.makespan_ns


def period(problem: PlacementProblem, order: list[int], place: list[int]) -> int:
    line = problem.evaluate(TaskPlan(tuple(place), tuple(order)))
    assert line is not None
    return line.period_ns


@pytest.mark.skipif(not has_compiler(), reason="numba is not installed")
@pytest.mark.parametrize("mode", MODES)
def test_compiled_loops_do_what_plain_ones_do(mode: TransferMode) -> None:
    graph = random_graph(5, 120, transfers=mode, hand_over_ns=200)
    problems = [PlacementProblem(graph, loops) for loops in (PLAIN, compiled_loops(*LOOPS))]
    found = []
    for problem in problems:
        plan = random_plan(problem, 3)
        ints = problem.loops.ints
        line = problem.evaluate(plan)
        assert line is not None
        position = [0] * 120
        for at, i in enumerate(plan.order):
            position[i] = at
        walked, best = (FlatTaskPlan(ints(plan.order), ints(plan.place), ints(position)) for _ in range(2))
        costs = ints([line.makespan_ns, line.makespan_ns])
        blocks = [40, *(42 + 3 * k for k in range(41)), *range(120)]
        evaluated = problem.loops[annealing].anneal(
            *(problem.flat, problem.scratch, problem.view, walked, best),
            *(ints(blocks), ints([UNIT, 0, 0, 0, -1]), ints([11]), ints([20_000, 0]), 2000, costs),
        )
        final = TaskPlan(tuple(map(int, best.place)), tuple(map(int, best.order)))
        checked = problem.evaluate(final)
        assert checked is not None
        assert checked.makespan_ns == int(costs[1]) < line.makespan_ns
        found.append((line, evaluated, final, problem.dispatch(plan.place), checked))
    assert found[0] == found[1]


def test_what_is_no_plan_of_the_graph_is_refused() -> None:
    problem = PlacementProblem(fork(TransferMode.DELAY), PLAIN)
    for place, order, named in (
        ((0, 0, 0, 0), (0, 1, 2), "every task"),
        ((0, 0, 0, 2), (0, 1, 2, 3), "device of 'three'"),
        ((0, 0, 0, 0), (1, 0, 2, 3), "readers behind"),
    ):
        with pytest.raises(InvalidValueError, match=named):
            problem.evaluate(TaskPlan(place, order))


def test_what_is_no_graph_is_refused() -> None:
    task = GraphTask("t", {"gpu": 1})
    for arguments, named in (
        (((), (task,), ()), "at least one device"),
        ((GPU_CPU, (task, task), ()), r"\['t'\]"),
        ((GPU_CPU, (GraphTask("t", {}),), ()), "at least one device"),
        ((GPU_CPU, (GraphTask("t", {"tpu": 1}),), ()), "tpu"),
        ((GPU_CPU, (GraphTask("t", {"gpu": -1}),), ()), "-1"),
        ((GPU_CPU, (task,), (UnitTensor("x", 0, (0,), 0),)), "stands behind 't'"),
        ((GPU_CPU, (task,), (UnitTensor("x", 7, (0,), 0),)), "task is 7"),
        ((GPU_CPU, (task,), (), (DeviceLink("gpu", "tpu", 1.0),)), "gpu:tpu"),
        ((GPU_CPU, (task,), (), (), {"tpu": 1}), "memory limit"),
        ((GPU_CPU, (task,), (), (), {}, -1), "hand_over_ns"),
    ):
        with pytest.raises(InvalidValueError, match=named):
            TaskGraph(*arguments)  # type: ignore[arg-type]
    for call in (lambda: DeviceLink("a", "b", 0), lambda: DeviceLink("a", "b", 1, -1), lambda: TaskDevice("")):
        with pytest.raises(InvalidValueError):
            call()


@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from((2, 3, 5)))
@settings(max_examples=40)
def test_contracted_plans_expand_to_plans_of_the_graph(seed: int, size: int, fan: int) -> None:
    problem = PlacementProblem(random_graph(seed, size, reach=6), PLAIN)
    level = contract(problem, fan)
    smaller = PlacementProblem(level.graph, PLAIN)  # which refuses circles
    plan = level.shrink(random_plan(problem, seed), smaller)
    line, whole = smaller.evaluate(plan), problem.evaluate(level.expand(plan))
    assert line is not None
    assert whole is not None
    assert whole.makespan_ns <= line.makespan_ns
    assert whole.used_bytes == line.used_bytes


@given(st.integers(0, 1000), st.integers(1, 14))
def test_a_plan_goes_by_names_and_comes_back(seed: int, size: int) -> None:
    problem = PlacementProblem(random_graph(seed, size, CORES), PLAIN)
    plan = random_plan(problem, seed)
    placed = placement_of("model", "graph", problem, plan, 500, 300)
    assert placed.cores == 2
    assert all(one.device != other.device for one, other in itertools.pairwise(placed.runs))
    again = plan_of(placed, problem)
    assert again.place == plan.place
    assert problem.evaluate(again) == problem.evaluate(plan)  # to the start of every task
    changes = sum(plan.place[one] != plan.place[other] for one, other in itertools.pairwise(plan.order))
    assert len(placed.runs) <= 2 * (changes + 1)
    fewer = msgspec.structs.replace(placed, runs=placed.runs[:-1])
    with pytest.raises(ProfileError, match=f"each of its {size} units once"):
        plan_of(fewer, problem)
    other = PlacementProblem(TaskGraph((TaskDevice("gpu"),), (GraphTask("t0", {"gpu": 1}),), ()), PLAIN)
    with pytest.raises(ProfileError, match=r"expected units of the model and one of gpu"):
        plan_of(placed, other)
