"""`cotenant co-schedule`: measured with the real engine, rehearsed, kept where serving looks, checked, refused in
words; and what `simulate` makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import onnx
import pytest
import torch
from torch import nn

from application_samples import fan, write_application
from commands import Run
from cotenant.execute.batches import row_buckets
from cotenant.measure import solo
from cotenant.measure.solo import Effort
from cotenant.plan_file import read_sections, sections_text
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile
from cotenant.repository import tasks_path, together_path
from cotenant.techniques.granularity import cli as plan_together
from cotenant.techniques.granularity.cli import requested_batches
from cotenant.techniques.granularity.joint_plan import Chunk, Wait
from cotenant.techniques.granularity.plan.kept import read_joint_plans
from cotenant.techniques.granularity.plan.planner import FoundJointPlan, found
from cotenant.techniques.granularity.plan_section import JOINT_PLANS_KEY
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator
from cotenant.techniques.granularity.serve import trial_run
from cotenant.techniques.granularity.serve.trial_run import TrialRunTimes
from cotenant.techniques.placement.measure import tasks as measuring
from cotenant.techniques.placement.plan_section import PLACEMENT
from cotenant.techniques.placement.task_profile import load_tasks, save_tasks
from cotenant.techniques.placement.unit_placement import UnitPlacement, runs_of
from cotenant.trace import read
from onnx_samples import Sketch, info
from profile_files import save_current
from repositories import config, write_model

OPTIONS = ("left", "right", "--batch", "left=4", "--budget-s", "0.3")
THREAD = '[device]\nisolation = "thread"\ncores = [0, 1]\n\n[policy]\nname = "joint"\n'


def chain(seed: int, products: int) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        s, x = Sketch(seed), "x"
        for _ in range(products):
            x = s.op("Tanh", s.op("MatMul", x, s.weight(16, 16)))
        s.op("MatMul", x, s.weight(16, 16), out="y")
        return s.model([info("x", ["batch", 16])], [info("y", ["batch", 16])])

    return make


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two models, measured quickly; what is found has chunks of left, and right behind the first."""
    monkeypatch.setattr(
        "cotenant.techniques.placement.task_profile.MOST_DISTURBANCE", 1e9
    )  # however busy the machine is
    monkeypatch.setattr(measuring, "_PAIR_RUNS", 3)
    monkeypatch.setattr(measuring, "_HAND_OVERS", 3)
    monkeypatch.setattr(measuring, "_TIMED_RUNS", 6)
    monkeypatch.setattr(measuring, "TASK_EFFORT", Effort(0.0, 2, 3, 1))
    monkeypatch.setattr(solo, "QUICK", Effort(0.0, 2, 3, 1))
    monkeypatch.setattr(trial_run, "EFFORT", Effort(0.0, 2, 3, 1))
    monkeypatch.setattr(plan_together, "_searched", searched)
    folder = tmp_path / "models"
    for seed, (name, products) in enumerate((("left", 5), ("right", 2))):
        write_model(folder, name, config(max_batch=4, slo_ms=60000), {1: chain(seed, products)})
    (folder / "cotenant.toml").write_text(THREAD)
    return folder


def searched(known: Any, budget_s: float, *, as_json: bool) -> FoundJointPlan:
    evaluator = JointEvaluator(known.tables, known.rules)
    plan = msgspec.structs.replace(
        evaluator.streams, chunks=(Chunk(0, 0, 3, (2, 2)),), waits=(Wait(1, 1, 0, 2),), barriers=((3, 2),)
    )
    other = msgspec.structs.replace(evaluator.streams, barriers=((1, 1), (3, 2)))
    return found(evaluator, plan, 2, (evaluator.streams, other))


def believed(monkeypatch: pytest.MonkeyPatch, plans_ns: Sequence[int | None]) -> None:
    """What is found is believed to gain, and comes to this on the device, where all at once takes 100."""

    monkeypatch.setattr("cotenant.techniques.granularity.plan.joint_overview.LEAST_GAIN_PCT", -1e9)
    monkeypatch.setattr(plan_together, "_trial_run", lambda *_: TrialRunTimes(120, 100, tuple(plans_ns)))


def test_names_and_rows_are_read_or_refused() -> None:
    assert requested_batches(("a", "b", "c"), "c=4,a=2") == {"a": 2, "b": 1, "c": 4}
    for names, rows in (("aa", None), (("a", ""), None), ("ab", "c=1"), ("ab", "a=0"), ("ab", "a"), ("ab", "a=x")):
        with pytest.raises(Exception, match="expected"):
            requested_batches(names, rows)


def test_a_set_is_measured_once_and_streams_are_as_good(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cotenant.techniques.granularity.plan.joint_overview.LEAST_GAIN_PCT", 1000.0)
    svg = tmp_path / "plan.svg"
    status, out, err = run("co-schedule", root, *OPTIONS, "--svg", svg)
    assert status == 0, err
    assert "All at once: " in out
    assert "By the plan: " in out
    assert "barrier 1: left before unit 3 (" in out
    assert "right before unit 2" in out
    assert "chunks: left, units 0 (" in out
    assert "wait: right before unit 1" in out
    assert "The plan gains less than 3 %" in out
    assert not together_path(root).exists()
    ElementTree.fromstring(svg.read_text())
    kept = load_tasks(tasks_path(root))
    left = kept.models["left"][2]
    assert sorted(left.batches) == list(row_buckets(4))[1:]
    assert left.splits == (tuple(range(len(left.units) + 1)),)
    assert kept.models["right"][2].batches == {}
    before = tasks_path(root).read_bytes()
    facts = json.loads(run("co-schedule", root, *OPTIONS, "--json")[1])
    assert tasks_path(root).read_bytes() == before
    assert (facts["members"], facts["gains"], facts["kept"]) == (["left=4", "right=1"], False, None)
    assert facts["bound_ns"] <= facts["makespan_ns"]


def test_what_gains_is_kept_checked_and_taken_back(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    believed(monkeypatch, (90, 95))
    plan = tmp_path / "together.toml"
    status, out, err = run("co-schedule", root, *OPTIONS, "--out", plan)
    assert status == 0, err
    assert "by the best plans 9e-05 ms and 9.5e-05 ms." in out
    assert f"Written: {together_path(root)}" in out
    [kept] = read_joint_plans(root)
    assert read_sections(plan) == {JOINT_PLANS_KEY: (kept,)}
    assert (kept.makespan_ns, kept.streams_ns, kept.sequential_ns, kept.is_measured) == (90, 100, 120, True)
    assert [(each.model, each.batch) for each in kept.members] == [("left", 4), ("right", 1)]
    digests = {name: by_cores[2].digest for name, by_cores in load_tasks(tasks_path(root)).models.items()}
    assert {each.model: each.graph for each in kept.members} == digests
    believed(monkeypatch, (98, None))
    status, out, _ = run("co-schedule", root, *OPTIONS)
    assert "and not followed: none is 3 % faster, so none is kept." in " ".join(out.split())
    assert not together_path(root).exists()
    status, out, _ = run("plan", "--check", plan, "--profiles", root)
    assert (status == 0) == ("holds: left=4 and right=1 together on 2 lanes" in out)
    profile = load_tasks(tasks_path(root))
    slow = msgspec.structs.replace(profile.models["left"][2], digest="another")
    save_tasks(tasks_path(root), msgspec.structs.replace(profile, models=profile.models | {"left": {2: slow}}))
    status, out, _ = run("plan", "--check", plan, "--profiles", root)
    assert status == 1
    assert "'left' changed: was" in out
    facts = json.loads(run("plan", "--check", plan, "--profiles", root, "--json")[1])
    assert (facts["holds"], len(facts["violations"])) == (False, 1)
    save_tasks(tasks_path(root), profile)
    placement = UnitPlacement("left", "another", 2, 1, 2, 1, runs_of((("unit", "cpu:0"),)))
    older = msgspec.structs.replace(kept, profile="older")
    plan.write_text(sections_text({PLACEMENT: (placement,), JOINT_PLANS_KEY: (older,)}))
    status, out, _ = run("plan", "--check", plan, "--profiles", root, "--json")
    both = json.loads(out)  # one object, which judges all that the file has
    assert (status, both["holds"]) == (1, False)
    assert any("placement of 'left'" in each for each in both["violations"])
    slower = any("joint plan of left=4 and right=1" in each for each in both["violations"])
    assert slower != bool(both["stale"]), "by what the units were measured to take it may be slower than all at once"
    monkeypatch.setattr("cotenant.techniques.placement.plan.judge.placement_faults", lambda *_: [])
    monkeypatch.setattr("cotenant.techniques.granularity.plan.kept.verdict", lambda *_: ([], True))
    status, out, _ = run("plan", "--check", plan, "--profiles", root)
    assert status == 0
    assert "holds: left placed on 2 cores" in out
    assert ", left=4 and right=1 together on 2 lanes" in out
    assert "it was made from another profile" in out


def as_torch(path: Path) -> None:
    """Five layers and the rest, as a program with an open batch, in place of the ONNX file."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [each for _ in range(5) for each in (nn.Linear(16, 16), nn.Tanh())]
        net = nn.Sequential(*layers, nn.Linear(16, 16)).eval()
    batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
    torch.export.save(torch.export.export(net, (torch.zeros(2, 16),), dynamic_shapes=batch), path / "model.pt2")
    (path / "model.onnx").unlink()


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_rehearsal_runs_all_ways_and_their_answers_agree(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    if suffix == "pt2":
        as_torch(root / "left" / "1")
    monkeypatch.setattr("cotenant.techniques.granularity.plan.joint_overview.LEAST_GAIN_PCT", -1e9)
    status, out, err = run("co-schedule", root, *OPTIONS, "--json")
    assert status == 0, err
    measured = json.loads(out)["measured"]
    assert measured["sequential_ns"] > 0 < measured["streams_ns"]
    assert len(measured["plans_ns"]) == 2
    assert all(measured["plans_ns"]), "the plan was followed"
    left = load_tasks(tasks_path(root)).models["left"][2]
    assert left.splits == (tuple(range(len(left.units) + 1)),)
    assert sorted(left.batches) == [2, 4]
    assert left.join_ns_per_mib > 0
    assert {tensor.size_bytes for tensor in left.tensors} == {16 * 4}
    if suffix == "pt2":
        status, _, err = run("place", root, "left")
        assert (status, "is a .pt2 file; placements support" in err) == (2, True)


def test_a_simulation_follows_what_is_kept(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    believed(monkeypatch, (90,))
    assert run("co-schedule", root, "left", "right", "--batch", "left=4,right=4")[0] == 0
    models = {}
    for name, by_cores in load_tasks(tasks_path(root)).models.items():
        digest, units = by_cores[2].digest, len(by_cores[2].units)
        points = tuple(Point(0, rows, 1, 9, *[rows * 10**6] * 4) for rows in (1, 2, 4))
        models[name] = ModelProfile(digest, points, (1000,) * units, (0, units), 1.0, splits=(tuple(range(units + 1)),))
    save_current(root, Profile(this_device(), "", "", models))
    write_application(root, "fan", fan("left", "right"), slo_ms=60000)
    workload, trace = tmp_path / "workload.toml", tmp_path / "trace.jsonl"
    workload.write_text('duration_s = 1\n[[tenant]]\nmodel = "fan"\nitems = 4\nrate = 5\n')
    status, _, err = run("simulate", workload, root, "--trace", trace)
    assert status == 0, err
    head, records = read(trace)
    assert len(head.policy_options["joint_plans"]) == 1
    launches = [action for each in records for kind, action in each.actions if kind == "Launch"]
    assert any(each["work"][6] for each in launches)
    assert any(each.get("after") for each in launches)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("left", "nobody"), "model 'nobody': there is no such directory"),
        (("left", "right", "--batch", "left=9"), "9 rows requested, but its max_batch is 4"),
        (("left", "right", "--lanes", "all"), "needs two lanes or more"),
        (("left", "left"), "'left left', expected different models"),
        (("left", "right", "--goal", "latency"), "No such option: --goal"),
        ((), "Missing argument 'models'"),
    ],
)
def test_what_cannot_be_planned_is_refused(root: Path, run: Run, options: Sequence[str], words: str) -> None:
    status, _, err = run("co-schedule", root, *options)
    assert status == 2
    assert words in " ".join(err.replace("│", " ").split())
