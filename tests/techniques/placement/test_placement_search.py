"""Strategies of placement against brute force, CP-SAT and bounds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.sirplus._milp import MixedInteger
from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.placement.plan.bounds import articulation_tasks, bound_of, load_bound_ns
from cotenant.techniques.placement.plan.exact import IntervalSearch
from cotenant.techniques.placement.plan.flat import PLAIN, PlacementProblem
from cotenant.techniques.placement.plan.heft import Heft
from cotenant.techniques.placement.plan.overflow import Goal, OverflowSearch, PlacementGoal
from cotenant.techniques.placement.plan.strategies import (
    CommSlowdown,
    QueueDelay,
    Sequential,
    Slowdown,
    makespan_ns,
    queueing_delays_ns,
    sequential_ns,
)
from cotenant.techniques.placement.plan.task_graph import (
    DeviceLink,
    GraphTask,
    TaskDevice,
    TaskGraph,
    TransferMode,
)
from cotenant.techniques.placement.task_profile import UnitTensor
from task_graphs import CORES, GPU_CPU, best_of_all, numbered, random_graph

KINDS = (
    (GPU_CPU, TransferMode.DELAY),
    (GPU_CPU, TransferMode.ENGINE),
    (GPU_CPU, TransferMode.LANE),
    (CORES, TransferMode.DELAY),
)
OURS = OverflowSearch(steps=1500)
OTHERS = (Sequential(), QueueDelay(moves_all=True), QueueDelay(), Slowdown(3000), CommSlowdown(3000), Heft())


@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from(KINDS), st.sampled_from((0, 400)))
@settings(max_examples=25)
def test_no_plan_is_below_the_bound_and_ours_is_near_the_best(
    seed: int, size: int, kind: tuple[tuple[TaskDevice, ...], TransferMode], hand: int
) -> None:
    problem = PlacementProblem(random_graph(seed, size, *kind, hand_over_ns=hand), PLAIN)
    best = best_of_all(problem)
    assert bound_of(problem).makespan_ns <= best
    found = OURS.solve(problem)
    assert best <= found.timeline.makespan_ns <= 1.1 * best
    assert found.bound_ns <= best
    assert not found.is_proved or found.timeline.makespan_ns == best
    for other in OTHERS:
        assert best <= makespan_ns(problem, other.place(problem))


@given(st.integers(0, 10_000), st.integers(2, 6), st.sampled_from(KINDS))
@settings(max_examples=15)
def test_from_a_plan_the_solver_gives_one_that_is_no_worse_and_a_bound_that_holds(
    seed: int, size: int, kind: tuple[tuple[TaskDevice, ...], TransferMode]
) -> None:
    pytest.importorskip("ortools", reason="exact placement needs OR-Tools")
    problem = PlacementProblem(random_graph(seed, size, *kind), PLAIN)
    plan, best = Heft().place(problem), best_of_all(problem)
    solved = IntervalSearch(seconds=20).solve(problem, plan)
    assert solved.bound_ns <= best
    if kind[1] is TransferMode.DELAY:
        assert solved.is_proved
        assert makespan_ns(problem, solved.plan) == best == solved.bound_ns
    hurried = IntervalSearch(seconds=1e-9).solve(problem, plan)
    assert hurried.bound_ns <= best
    assert makespan_ns(problem, hurried.plan) <= makespan_ns(problem, plan)


@pytest.mark.parametrize("seed", range(6))
def test_the_exact_solver_finds_the_best_of_all(seed: int) -> None:
    pytest.importorskip("ortools", reason="exact placement needs OR-Tools")
    problem = PlacementProblem(random_graph(seed, 5, CORES if seed % 3 == 0 else GPU_CPU), PLAIN)
    best = best_of_all(problem)
    solved = IntervalSearch(seconds=20).solve(problem)
    assert solved.is_proved
    assert solved.bound_ns == makespan_ns(problem, solved.plan) == best


@pytest.mark.parametrize("seed", range(6))
def test_the_milp_of_the_benchmark_finds_the_best_of_all(seed: int) -> None:
    pytest.importorskip("ortools", reason="exact placement needs OR-Tools")
    problem = PlacementProblem(random_graph(seed, 5, CORES if seed % 3 == 0 else GPU_CPU), PLAIN)
    best = best_of_all(problem)
    milp = MixedInteger(seconds=20).solve(problem)
    assert milp.bound_ns <= best <= makespan_ns(problem, milp.plan) <= best * 1.01 + 1


@pytest.mark.parametrize("transfers", [TransferMode.ENGINE, TransferMode.LANE])
@pytest.mark.parametrize("seed", range(4))
def test_the_exact_bound_holds_where_copies_take_turns(seed: int, transfers: TransferMode) -> None:
    pytest.importorskip("ortools", reason="exact placement needs OR-Tools")
    problem = PlacementProblem(random_graph(seed, 5, transfers=transfers), PLAIN)
    best = best_of_all(problem)
    assert best * 0.9 <= IntervalSearch(seconds=20).solve(problem).bound_ns <= best


@pytest.mark.parametrize("seed", range(3))
def test_ours_is_near_what_is_proved_of_small_graphs(seed: int) -> None:
    pytest.importorskip("ortools", reason="exact placement needs OR-Tools")
    problem = PlacementProblem(random_graph(seed, 16, reach=5), PLAIN)
    solved = IntervalSearch(seconds=20).solve(problem)
    assert solved.is_proved
    found = OverflowSearch(steps=4000).solve(problem)
    assert found.bound_ns <= solved.bound_ns <= found.timeline.makespan_ns <= 1.05 * solved.bound_ns
    assert OverflowSearch(steps=400, exact_seconds=20).solve(problem).is_proved


@given(st.integers(0, 1000), st.sampled_from(KINDS))
@settings(max_examples=10)
def test_ours_is_never_worse_than_what_it_began_with(
    seed: int, kind: tuple[tuple[TaskDevice, ...], TransferMode]
) -> None:
    problem = PlacementProblem(random_graph(seed, 40, *kind, hand_over_ns=500, reach=8), PLAIN)
    for noise in (0.0, 0.3):
        found = OverflowSearch(steps=40, noise=noise, seed=seed).solve(problem)
        worst = min(makespan_ns(problem, other.place(problem)) for other in (Sequential(), CommSlowdown()))
        assert found.timeline.makespan_ns <= worst


def test_equal_seeds_give_equal_plans_and_progress_ends_the_search() -> None:
    problem = PlacementProblem(random_graph(3, 60, reach=8), PLAIN)
    assert OURS.solve(problem) == OURS.solve(problem)
    told: list[tuple[int, int, int]] = []

    def stop(evaluated: int, best_ns: int, bound_ns: int) -> bool:
        told.append((evaluated, best_ns, bound_ns))
        return len(told) < 2

    short = OverflowSearch(steps=10_000, progress=stop).solve(problem)
    assert len(told) == 2
    assert told[0][2] <= short.timeline.makespan_ns <= told[0][1]


def wide(classes: int = 10, limits: dict[str, int] | None = None) -> TaskGraph:
    """A trunk on the GPU, then chains of light tasks that a last one joins."""
    gpu_only = GraphTask("trunk", {"gpu": 300_000}, {}, {"gpu": 1000})
    tasks = [gpu_only]
    tensors: list[tuple[str, str, tuple[str, ...], int]] = []
    heads = []
    for number in range(classes):
        names = [f"c{number}.{step}" for step in range(4)]
        tasks += [GraphTask(name, {"gpu": 8000, "cpu": 9000}, {}, {"gpu": 10, "cpu": 10}) for name in names]
        tensors += [(f"{a}>", a, (b,), 100) for a, b in itertools.pairwise(names)]
        tensors.append((f"{names[-1]}>", names[-1], ("join",), 100))
        heads.append(names[0])
    tasks.append(GraphTask("join", {"gpu": 8000, "cpu": 9000}))
    tensors.insert(0, ("features", "trunk", tuple(heads), 120_000))
    links = (DeviceLink("gpu", "cpu", 12e9, 10_000), DeviceLink("cpu", "gpu", 12e9, 10_000))
    return TaskGraph(GPU_CPU, tuple(tasks), numbered(tasks, tensors), links, limits or {})


def test_ours_halves_the_branches_of_a_wide_graph() -> None:
    problem = PlacementProblem(wide(), PLAIN)
    found = OverflowSearch(steps=2000).solve(problem)
    alone = sequential_ns(problem, Sequential().place(problem).place)
    assert alone == 300_000 + 41 * 8000
    assert found.timeline.makespan_ns <= 300_000 + 6 * 32_000
    assert found.gap_pct < 5
    assert makespan_ns(problem, CommSlowdown().place(problem)) > found.timeline.makespan_ns
    assert bound_of(problem).articulation == (0, problem.size - 1)
    assert sum(wait > 0 for wait in queueing_delays_ns(problem, Sequential().place(problem))) == 9


def test_the_bound_adds_up_what_a_fan_holds_behind_a_long_body() -> None:
    """Whose tasks are all nearer to being articulation tasks than the one that the fan hangs on."""
    gpu, both = {"gpu": 1000}, {"gpu": 1000, "cpu": 1000}
    pairs = [(GraphTask(f"a{number}", gpu), GraphTask(f"b{number}", gpu)) for number in range(40)]
    fan = [GraphTask(f"fan{number}", both) for number in range(40)]
    hub, beside, end = GraphTask("hub", gpu), GraphTask("beside", gpu), GraphTask("end", gpu)
    tensors: list[tuple[str, str, tuple[str, ...], int]] = [
        (f"{one.name}>", one.name, (behind[0].name, behind[1].name), 0)
        for before, behind in itertools.pairwise(pairs)
        for one in before
    ]
    tensors += [(f"{one.name}>", one.name, ("hub", "beside"), 0) for one in pairs[-1]]
    tensors.append(("hub>", "hub", tuple(task.name for task in fan), 0))
    tensors += [(f"{task.name}>", task.name, ("end",), 0) for task in (*fan, beside)]
    links = tuple(DeviceLink(*way, 1e12) for way in (("gpu", "cpu"), ("cpu", "gpu")))
    tasks = (*(task for pair in pairs for task in pair), hub, beside, *fan, end)
    bound = bound_of(PlacementProblem(TaskGraph(GPU_CPU, tasks, numbered(tasks, tensors), links), PLAIN))
    least = 1000 * (2 * 40 + 1 + 41 / 2 + 1)
    assert least - 1000 <= bound.makespan_ns <= least + 1000, "body, hub, fan and what is beside it by halves, end"


def test_a_chain_is_left_alone() -> None:
    names = [f"t{i}" for i in range(30)]
    tasks = tuple(GraphTask(name, {"gpu": 8000, "cpu": 9000}) for name in names)
    tensors = tuple(UnitTensor(f"x{a}", a, (b,), 10) for a, b in itertools.pairwise(range(30)))
    links = (DeviceLink("gpu", "cpu", 12e9, 10_000), DeviceLink("cpu", "gpu", 12e9, 10_000))
    found = OURS.solve(PlacementProblem(TaskGraph(GPU_CPU, tasks, tensors, links), PLAIN))
    assert found.is_proved
    assert set(found.plan.place) == {0}


def test_memory_limits_hold_or_the_refusal_names_them() -> None:
    problem = PlacementProblem(wide(limits={"gpu": 1150, "cpu": 10_000}), PLAIN)
    found = OverflowSearch(steps=2000).solve(problem)
    assert found.timeline.is_feasible
    assert found.timeline.used_bytes[0] <= 1150
    with pytest.raises(PlanError, match=r"gpu takes \d+ bytes, the limit is 900"):
        OverflowSearch(steps=200).solve(PlacementProblem(wide(limits={"gpu": 900}), PLAIN))


def test_other_goals_are_reached() -> None:
    problem = PlacementProblem(wide(), PLAIN)
    latency = OURS.solve(problem).timeline
    throughput = OverflowSearch(PlacementGoal(Goal.PERIOD), steps=2000).solve(problem).timeline
    assert throughput.period_ns <= 1.01 * max(300_000, load_bound_ns(problem, range(problem.size)))
    bound_ns = 560_000
    memory = OverflowSearch(PlacementGoal(Goal.MEMORY, "gpu", bound_ns), steps=3000).solve(problem).timeline
    assert memory.makespan_ns <= bound_ns
    assert memory.used_bytes[0] < latency.used_bytes[0]
    with pytest.raises(PlanError, match="the bound 200000"):
        OverflowSearch(PlacementGoal(Goal.LATENCY, "", 200_000), steps=100).solve(problem)
    with pytest.raises(InvalidValueError, match="'tpu'"):
        OverflowSearch(PlacementGoal(Goal.MEMORY, "tpu")).solve(problem)
    with pytest.raises(InvalidValueError):
        PlacementGoal(Goal.MEMORY)


def test_without_links_everything_stays_where_it_can() -> None:
    graph = wide(2)
    alone = TaskGraph(graph.devices, graph.tasks, graph.tensors)
    found = OURS.solve(PlacementProblem(alone, PLAIN))
    assert set(found.plan.place) == {0}
    tasks = (*graph.tasks[:-1], GraphTask("join", {"cpu": 1}))
    with pytest.raises(PlanError, match="without a link"):
        OURS.solve(PlacementProblem(TaskGraph(graph.devices, tasks, graph.tensors), PLAIN))


def test_comm_sd_as_published_keeps_what_is_quicker_elsewhere_whatever_it_copies() -> None:
    tasks = (
        GraphTask("big", {"gpu": 50_000, "cpu": 900_000}),
        GraphTask("view", {"gpu": 8000, "cpu": 7000}),
        GraphTask("next", {"gpu": 50_000, "cpu": 900_000}),
    )
    tensors = (UnitTensor("a", 0, (1,), 10_000_000), UnitTensor("b", 1, (2,), 10_000_000))
    links = (DeviceLink("gpu", "cpu", 12e9, 10_000), DeviceLink("cpu", "gpu", 12e9, 10_000))
    problem = PlacementProblem(TaskGraph(GPU_CPU, tasks, tensors, links), PLAIN)
    assert CommSlowdown(as_published=True).place(problem).place == (0, 1, 0)
    assert CommSlowdown().place(problem).place == (0, 0, 0)


@given(st.integers(0, 10_000), st.integers(1, 12))
@settings(max_examples=30)
def test_articulation_tasks_are_before_or_behind_all_others(seed: int, size: int) -> None:
    problem = PlacementProblem(random_graph(seed, size, reach=2), PLAIN)
    reach = [[i == j for j in range(size)] for i in range(size)]
    for i in range(size):
        for j in problem.preds[i]:
            for k in range(size):
                reach[k][i] = reach[k][i] or reach[k][j]
    expected = [i for i in range(size) if all(reach[i][j] or reach[j][i] for j in range(size))]
    assert articulation_tasks(problem) == expected
