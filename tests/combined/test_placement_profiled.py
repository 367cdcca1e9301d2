"""Task graphs made from profiles of tasks, what is said of their placements, and their place in plan files."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings

from cotenant.errors import PlanError
from cotenant.plan_file import TENANTS, parse_sections, sections_text
from cotenant.techniques.partitions.plan.file import PlanFile, Request, parse_plan
from cotenant.techniques.partitions.plan.types import DeviceType, Load, Plan
from cotenant.techniques.placement.plan.bounds import bound_of
from cotenant.techniques.placement.plan.flat import PLAIN, PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.judge import placement_faults
from cotenant.techniques.placement.plan.overflow import OverflowSearch
from cotenant.techniques.placement.plan.overview import overview, stages_of
from cotenant.techniques.placement.plan.placed_units import placement_of, plan_of
from cotenant.techniques.placement.plan.profiled import graph_of
from cotenant.techniques.placement.plan.strategies import Sequential, makespan_ns, queueing_delays_ns
from cotenant.techniques.placement.plan_section import PLACEMENT
from cotenant.techniques.placement.task_profile import ModelTasks
from cotenant.techniques.placement.unit_placement import UnitPlacement, cores_of, device_names
from task_profiles import linear_tasks, some_tasks, wide_tasks

SEARCH = OverflowSearch(steps=200)


def problem_of(tasks: ModelTasks) -> PlacementProblem:
    return PlacementProblem(graph_of(tasks), PLAIN)


def placed(tasks: ModelTasks, plan: TaskPlan | None = None) -> UnitPlacement:
    problem = problem_of(tasks)
    found = SEARCH.solve(problem)
    before = makespan_ns(problem, Sequential().place(problem))
    return placement_of("net", tasks.graph, problem, plan or found.plan, before, found.bound_ns)


@given(some_tasks())
@settings(max_examples=50)
def test_a_graph_has_the_units_and_tensors_of_its_profile(tasks: ModelTasks) -> None:
    graph = graph_of(tasks)
    problem = PlacementProblem(graph, PLAIN)
    assert tuple(task.name for task in graph.tasks) == tasks.units
    assert {device.name for device in graph.devices} == set(device_names(tasks.cores))
    for device in graph.devices:
        assert {f"cpu:{core}" for core in cores_of(device.name)} == set(device.lanes)
    assert graph.tensors == tasks.tensors
    order = tuple(range(problem.size))
    for number, device in enumerate(graph.devices):  # in a row nothing is handed over
        line = problem.evaluate(TaskPlan((number,) * problem.size, order))
        assert line is not None
        times = tasks.whole if len(device.lanes) > 1 else tasks.core
        assert line.makespan_ns == sum(times.unit_ns)


@given(some_tasks(), some_tasks())
@settings(max_examples=12)
def test_what_is_said_of_a_placement_is_what_the_evaluator_says(tasks: ModelTasks, other: ModelTasks) -> None:
    problem = problem_of(tasks)
    found = SEARCH.solve(problem)
    view = overview("net", problem, found)
    plan = Sequential().place(problem)
    assert view.sequential_ns == makespan_ns(problem, plan)
    assert view.latency_ns == makespan_ns(problem, found.plan) <= view.sequential_ns
    assert view.bound_ns <= view.latency_ns
    assert view.queueing_ns == tuple(queueing_delays_ns(problem, plan))
    assert sum(view.service_ns) == view.sequential_ns  # nothing overlaps
    assert sum(stage.tasks for stage in view.stages) == problem.size
    assert sum(stage.waits_ns for stage in view.stages) == sum(view.queueing_ns)
    for drawn, line in ((view.before, problem.evaluate(plan)), (view.after, found.timeline)):
        assert line is not None
        for lane, busy in zip(problem.lane_names, line.busy_ns, strict=True):
            stretches = drawn.on(lane)
            assert sum(each.end_ns - each.start_ns for each in stretches) == busy
            assert all(one.end_ns <= after.start_ns for one, after in itertools.pairwise(stretches))
    for stage in view.stages:
        assert sum(stage.runs_on.values()) == stage.branches
    placed_ns = sum(sum(stage.placed_ns.values()) for stage in view.stages)
    assert placed_ns == sum(problem.service[i][d] for i, d in enumerate(found.plan.place))


@given(some_tasks())
@settings(max_examples=50)
def test_stages_are_all_tasks_and_branches_of_one_do_not_read_each_other(tasks: ModelTasks) -> None:
    problem = problem_of(tasks)
    stages = stages_of(problem)
    home = {}
    for number, branches in enumerate(stages):
        for at, branch in enumerate(branches):
            home |= dict.fromkeys(branch, (number, at))
    assert sorted(home) == list(range(problem.size))
    for i, before in enumerate(problem.preds):
        for j in before:
            assert home[j] == home[i] or home[j][0] < home[i][0]


def test_the_branches_of_a_wide_model_are_divided_and_a_chain_is_left_alone() -> None:
    tasks = wide_tasks(branches=14)
    problem = problem_of(tasks)
    view = overview("wide", problem, SEARCH.solve(problem))
    assert [stage.branches for stage in view.stages] == [1, 14, 1]
    assert view.stages[0].runs_on == {"cpu:0-1": 1}
    assert view.stages[1].runs_on == {"cpu:0": 7, "cpu:1": 7}
    assert view.gains
    assert view.queueing_ns[2] == 0 < view.queueing_ns[4]
    chain = problem_of(linear_tasks())
    found = SEARCH.solve(chain)
    view = overview("chain", chain, found)
    assert not view.gains
    assert view.latency_ns == view.sequential_ns == 2_500_000 == bound_of(chain).makespan_ns
    assert found.is_proved
    assert view.most_gain_pct == 0
    assert sum(view.queueing_ns) == 0


@given(some_tasks())
@settings(max_examples=12)
def test_plan_files_hold_placements_and_give_them_back(tasks: ModelTasks) -> None:
    placement = placed(tasks)
    alone = {PLACEMENT: (placement,)}
    assert parse_sections(sections_text(alone), "plan.toml") == alone
    loads, devices = (Load("net", "net", 10.0, 5_000_000),), (DeviceType("cpu", ((2,),), 1 << 53),)
    file = PlanFile(Request(loads, devices), Plan((), "ours"), 0.1, "abc")
    whole = {TENANTS: file, PLACEMENT: (placement, placement)}
    assert parse_sections(sections_text(whole), "plan.toml") == whole


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("cores = 2", "cores = 0", r"placement\[0\]\.cores"),
        ('device = "cpu:0-1"', "device = 3", r"run\[0\]\.device"),
        ("bound_ns", "least_ns", "placement"),
    ],
)
def test_a_broken_placement_is_named(before: str, after: str, words: str) -> None:
    text = sections_text({PLACEMENT: (placed(wide_tasks()),)})
    assert before in text
    with pytest.raises(PlanError, match=f"plan.toml: .*{words}"):
        parse_sections(text.replace(before, after, 1), "plan.toml")


def test_placements_alone_are_no_plan_of_tenants() -> None:
    text = sections_text({PLACEMENT: (placed(wide_tasks()),)})
    with pytest.raises(PlanError, match=r"^plan\.toml: has no \[\[device\]\]"):
        parse_plan(text, "plan.toml")


@given(some_tasks(), some_tasks())
@settings(max_examples=12)
def test_a_placement_holds_on_what_it_was_made_from(tasks: ModelTasks, other: ModelTasks) -> None:
    placement = placed(tasks)
    problem = problem_of(tasks)
    before = makespan_ns(problem, Sequential().place(problem))
    faults = placement_faults(placement, {tasks.cores: tasks})
    assert bool(faults) == (makespan_ns(problem, plan_of(placement, problem)) >= before)
    assert "were not measured" in placement_faults(placement, {})[0]
    changed = msgspec.structs.replace(other, graph="another")
    assert placement_faults(placement, {placement.cores: changed}) == [
        f"placement of 'net' on {placement.cores} cores: was made for graph graph, the measured one is another"
    ]


def test_faults_of_placements_are_named() -> None:
    tasks = wide_tasks()
    measured = {2: tasks}
    placement = placed(tasks)
    assert placement_faults(placement, measured) == []
    fewer = msgspec.structs.replace(placement, runs=placement.runs[:-1])
    assert "each of its 15 units once" in placement_faults(fewer, measured)[0]
    backwards = msgspec.structs.replace(placement, runs=placement.runs[::-1])
    assert "readers behind what they read" in placement_faults(backwards, measured)[0]
    problem = problem_of(tasks)
    slow = placed(tasks, TaskPlan((1,) * problem.size, tuple(range(problem.size))))
    assert "is predicted to take" in placement_faults(slow, measured)[0]
