"""`cotenant place`: measured with the real engine, kept where serving looks, checked, refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from commands import Run
from cotenant.measure.solo import Effort
from cotenant.plan_file import TENANTS, read_sections
from cotenant.repository import graphs_path, placement_path, tasks_path
from cotenant.techniques.placement.cli import Aim, PlacementRequest, measured_ratio
from cotenant.techniques.placement.measure import tasks as measuring
from cotenant.techniques.placement.measure.placed import check_path
from cotenant.techniques.placement.measure.tasks import measure_tasks
from cotenant.techniques.placement.plan.flat import PLAIN, PlacementProblem
from cotenant.techniques.placement.plan.heft import Heft
from cotenant.techniques.placement.plan.placed_units import placement_of
from cotenant.techniques.placement.plan.profiled import graph_of
from cotenant.techniques.placement.plan_section import PLACEMENT
from cotenant.techniques.placement.task_profile import ModelTasks, load_tasks, save_tasks
from cotenant.techniques.placement.unit_placement import load_placement
from cotenant.work import Share
from onnx_samples import residual_cnn
from repositories import config, write_model
from task_profiles import linear_tasks, wide_tasks

BUDGET = ("--budget-s", "0.3")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one model, which was measured quickly."""
    monkeypatch.setattr(
        "cotenant.techniques.placement.task_profile.MOST_DISTURBANCE", 1e9
    )  # however busy the machine is
    monkeypatch.setattr(measuring, "_PAIR_RUNS", 3)
    monkeypatch.setattr(measuring, "_HAND_OVERS", 3)
    monkeypatch.setattr(measuring, "_TIMED_RUNS", 6)
    monkeypatch.setattr("cotenant.techniques.placement.plan.flat.best_loops", lambda *_: PLAIN)
    monkeypatch.setattr(measuring, "TASK_EFFORT", Effort(0.0, 2, 3, 1))
    write_model(tmp_path / "models", "net", config(), {1: residual_cnn})
    return tmp_path / "models"


@pytest.fixture
def known(root: Path, run: Run) -> Callable[[ModelTasks], ModelTasks]:
    """Puts made-up times of another graph into the profile of tasks, under the model's digest."""
    assert run("place", root, "net", *BUDGET)[0] == 0
    profile = load_tasks(tasks_path(root))
    mine = profile.models["net"][2]

    def put(tasks: ModelTasks) -> ModelTasks:
        made = msgspec.structs.replace(tasks, digest=mine.digest, graph=mine.graph, content=mine.content)
        save_tasks(tasks_path(root), msgspec.structs.replace(profile, models={"net": {2: made}}))
        return made

    return put


def unchecked(monkeypatch: pytest.MonkeyPatch, tasks: ModelTasks, ratio: float = 0.6) -> None:
    """The profile is taken as it is, though the model at hand has other units, and what is placed takes its ratio."""
    monkeypatch.setattr("cotenant.techniques.placement.measure.tasks.measure_tasks", lambda *_, **__: ("net", tasks))
    monkeypatch.setattr("cotenant.techniques.placement.cli.measured_ratio", lambda *_: ratio)


def test_a_model_is_measured_once_and_shown(root: Path, run: Run) -> None:
    status, out, err = run("place", root, "net", "--lanes", "all", *BUDGET)
    assert status == 0, err
    assert "Sequential: " in out
    assert "ms placed" in out or "no placement" in out
    assert "No launch of this server" not in out
    before = tasks_path(root).read_bytes()
    status, out, _ = run("place", root, "net", *BUDGET, "--json")
    facts = json.loads(out)
    assert tasks_path(root).read_bytes() == before
    assert status == 0
    assert facts["cores"] == 2
    assert facts["latency_ns"] <= facts["sequential_ns"]
    assert len(facts["queueing_ns"]) == len(facts["service_ns"]) == sum(stage["tasks"] for stage in facts["stages"])
    assert run("place", root, "net", *BUDGET, "--fresh", "--json")[0] == 0
    assert tasks_path(root).read_bytes() != before


def test_what_gains_is_kept_checked_and_taken_back(
    root: Path, run: Run, known: Callable[[ModelTasks], ModelTasks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tasks = known(wide_tasks(branches=14))
    unchecked(monkeypatch, tasks)
    kept, plan, svg = placement_path(graphs_path(root), tasks.graph, 2), tmp_path / "plan.toml", tmp_path / "plan.svg"
    status, out, err = run("place", root, "net", *BUDGET, "--out", plan, "--svg", svg)
    assert status == 0, err
    assert f"Written: {plan}" in out
    assert "the placement takes 0.60 of the time of a sequential run on 2 cores." in out
    assert "set placement = 'auto' under [model] in net/config.toml" in out
    assert "Launches of this server get one core each" in out
    placement = load_placement(kept)
    assert read_sections(plan) == {PLACEMENT: (placement,)}
    assert placement.latency_ns < 0.7 * placement.sequential_ns
    assert len(placement.runs) < 12  # branches, not units
    ElementTree.fromstring(svg.read_text())
    status, out, _ = run("plan", "--check", plan, "--profiles", root)
    assert status == 0
    assert "holds: net placed on 2 cores" in out
    unchecked(monkeypatch, tasks, 1.2)
    write_model(root, "net", config() + 'placement = "auto"\n', {1: residual_cnn})
    status, out, _ = run("place", root, "net", *BUDGET, "--lanes", "all")
    assert "the placement takes 1.20 of the time" in out
    assert "it gains less than 3 %, so it is not kept for serving" in out
    assert not kept.exists()
    unchecked(monkeypatch, tasks, 0.98)  # within what equal ways differ by
    assert run("place", root, "net", *BUDGET, "--lanes", "all")[0] == 0
    assert not kept.exists()
    unchecked(monkeypatch, tasks)
    status, out, _ = run("place", root, "net", *BUDGET, "--lanes", "all")
    assert kept.exists()
    assert "set " not in out
    known(linear_tasks(31))
    status, out, _ = run("plan", "--check", plan, "--profiles", root)
    assert status == 1
    assert "placement of 'net' on 2 cores: " in out
    facts = json.loads(run("plan", "--check", plan, "--profiles", root, "--json")[1])
    assert not facts["holds"]
    unchecked(monkeypatch, known(linear_tasks()))
    status, out, _ = run("place", root, "net", *BUDGET)
    assert status == 0
    assert "no placement can gain 3 %" in out
    assert not kept.exists()


def test_what_was_placed_is_measured_anew_each_time(root: Path, tmp_path: Path) -> None:
    tasks = measure_tasks(root, "net", Share((0, 1)), measuring.TASK_EFFORT, on_step=lambda *_: None)[1]
    problem = PlacementProblem(graph_of(tasks), PLAIN)
    placement = placement_of("net", tasks.graph, problem, Heft().place(problem), 1, 1)
    request = PlacementRequest(root, "net", Aim.latency, None)
    assert measured_ratio(request, placement, Share((0, 1))) > 0
    path = check_path(graphs_path(root), placement)
    path.write_text("not read")
    ratio = measured_ratio(request, placement, Share((0, 1)))
    assert json.loads(path.read_text())["ratio"] == pytest.approx(ratio, abs=1e-4)


def test_throughput_counts_the_busiest_lane(
    root: Path, run: Run, known: Callable[[ModelTasks], ModelTasks], monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch, known(wide_tasks()))
    least = json.loads(run("place", root, "net", *BUDGET, "--json")[1])
    most = ("--goal", "throughput", "--latency-bound-ms", str(2 * least["latency_ns"] / 1e6))
    facts = json.loads(run("place", root, "net", *BUDGET, "--json", *most)[1])
    assert facts["goal"] == "throughput"
    assert facts["period_ns"] <= least["period_ns"]
    assert facts["latency_ns"] <= 2 * least["latency_ns"]
    out = run("place", root, "net", *BUDGET, *most)[1]
    assert "The busiest core is busy for " in out
    status, _, err = run("place", root, "net", *BUDGET, *most[:3], "0.001")
    assert status == 2
    assert "no placement was found within the limits; in the best one, the latency is" in err


def test_doubts_about_the_measurement_are_said(
    root: Path, run: Run, known: Callable[[ModelTasks], ModelTasks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.techniques.placement.task_profile.MOST_DISTURBANCE", 1.1)
    tasks = known(wide_tasks())
    slow = msgspec.structs.replace(tasks.core, whole_ns=2 * tasks.core.whole_ns)
    unchecked(monkeypatch, msgspec.structs.replace(tasks, core=slow, disturbance=1.7))
    out = run("place", root, "net", *BUDGET)[1].replace("\n", " ")
    assert "On one core the times of the units add up to 0.50 of the measured whole" in out
    assert "wall time 1.70 of CPU time" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("other",), "model 'other': there is no such directory"),
        (("net", "--latency-bound-ms", 5), "--latency-bound-ms needs --goal throughput"),
        (("net", "--poisson"), "No such option: --poisson"),
        (("net", "--goal", "beauty"), "beauty"),
        ((), "Missing argument 'model'"),
        (("net", "--set", "device.cores=[0]"), "--set"),
    ],
)
def test_what_cannot_be_placed_is_refused(root: Path, run: Run, words: tuple[object, ...], says: str) -> None:
    status, _, err = run("place", root, *words)
    assert status == 2
    assert says in " ".join(err.replace("│", " ").split())


def test_one_core_and_a_gpu_that_is_not_there_are_refused(root: Path, run: Run) -> None:
    (root / "cotenant.toml").write_text("[device]\ncores = [0]\n")
    assert "needs at least two cores, the device has 1" in run("place", root, "net")[2]
    (root / "cotenant.toml").write_text('[device]\nkind = "cuda"\n')
    assert "[device]: kind is 'cuda', but" in run("place", root, "net")[2]


def test_a_plan_for_tenants_carries_the_placements_of_their_models(
    root: Path, run: Run, known: Callable[[ModelTasks], ModelTasks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unchecked(monkeypatch, known(wide_tasks(branches=14)))
    assert run("place", root, "net", *BUDGET)[0] == 0
    assert run("profile", root, "--budget", 0, "--lanes", "all")[0] == 0
    request, plan = tmp_path / "tenants.toml", tmp_path / "plan.toml"
    request.write_text('[[device]]\nname = "cpu"\ncores = 2\n[[tenant]]\nname = "net"\nrate = 1\nslo_ms = 1000\n')
    status, out, err = run("plan", request, "--profiles", root, "--quick", "--planner", "elastic", "-o", plan)
    assert status == 0, err
    assert "placement: net placed on 2 cores" in out
    found = read_sections(plan)
    assert list(found) == [TENANTS, PLACEMENT]
    assert [each.model for each in found[PLACEMENT]] == ["net"]
    assert run("plan", "--check", plan, "--profiles", root)[0] == 0
    known(linear_tasks(31))
    status, out, _ = run("plan", "--check", plan, "--profiles", root)
    assert status == 1
    assert "placement of 'net' on 2 cores" in out
