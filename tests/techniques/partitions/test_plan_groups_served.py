"""A plan whose partition has a group, served with real models: who runs where, what is believed, and right answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client import Client, Watch
from commands import runner
from cotenant.config import DeviceSection, PlanSection, PolicySection, ServerConfig
from cotenant.core.actions import Launch, group_of
from cotenant.core.events import PolicyChanged, PredictorChanged
from cotenant.predict.grouped import GroupedPredictor
from cotenant.repository import STATE_FOLDER
from cotenant.serve.server import Server
from cotenant.techniques.overlap.measure.measured_groups import fit_groups
from cotenant.techniques.partitions.plan.file import PlanFile, Request, plan_text
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load, PartitionPlan, Plan, Slot
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.techniques.partitions.serve.plan_lanes import Cores, open_plan
from cotenant.techniques.partitions.serve.replan import Replanner
from cotenant.trace import basis_of, read
from cotenant.types import Outcome
from group_campaign import CORES, SLOTS, measure, profiled
from repositories import config, scaled, write_model

MS = 1_000_000
SLO_MS = 20_000
KIND = DeviceType("cpu", ((2,), (1, 1)), 1 << 40)
GROUP = tuple(Slot(name, 2, 11.0, 1, 1) for name in "ab")
TURNS = tuple(Slot(name, 2, 11.0) for name in "ab")
ROUNDS = 12

pytestmark = pytest.mark.skipif(SLOTS < 2, reason="a group needs two cores")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("groups") / "models"
    for name, factor in (("a", 1.0), ("b", 2.0)):
        write_model(root, name, config(max_batch=4, slo_ms=SLO_MS), {1: lambda factor=factor: scaled(factor)})
    profile = profiled(root)
    measure(root, profile)
    fit_groups(root, profile)
    return root


def write_plan(path: Path, slots: tuple[Slot, ...]) -> None:
    loads = tuple(Load(name, name, 10.0, SLO_MS * MS) for name in "ab")
    device = DevicePlan("cpu", (PartitionPlan(2, 50 * MS, slots),))
    path.write_text(plan_text(PlanFile(Request(loads, (KIND,)), Plan((device,), "by hand"), 0.1)))


def x(value: float) -> dict[str, Any]:
    return {"x": np.full((1, 8), value, np.float32)}


def ask_together(client: Client) -> None:
    """Queries of both, that wait for each other; every answer is looked at."""
    asked = [(name, value) for value in range(ROUNDS) for name in "aabb"]
    ends = client.wait(*[client.submit(name, x(value)) for name, value in asked])
    for (name, value), end in zip(asked, ends, strict=True):
        assert end.outcome is Outcome.ANSWERED, end.reason
        [answer] = end.outputs.values()
        expected = value / (1 + value) * (1.0 if name == "a" else 2.0)
        np.testing.assert_allclose(answer, np.full((1, 8), expected), rtol=1e-6)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_plan_with_a_group_is_taken_over_and_its_members_start_together(
    measured: Path, tmp_path: Path, isolation: str
) -> None:
    path, watch, cores = tmp_path / "plan.toml", Watch(), CORES[:2]
    write_plan(path, TURNS)
    plan = PlanSection(file=str(path))
    settings = ServerConfig(
        device=DeviceSection(cores=cores, isolation=isolation), policy=PolicySection(name="duty_cycle"), plan=plan
    )
    served = open_plan(path, 0, Cores(cores))
    server = Server(measured, settings, plan=served.lanes)
    follower = Replanner(server, path, served, plan)
    server.start(watch, follower)
    follower.start()
    try:
        client = Client(server)
        ask_together(client)
        assert not isinstance(server.beliefs.predictor, GroupedPredictor)
        write_plan(path, GROUP)
        follower.reload()
        assert follower.wait_version(2, 30.0)
        ask_together(client)
        [partition] = server.plan()["plan"]["partitions"]
        believed = server.beliefs.predictor
    finally:
        follower.stop()
        server.stop()
    assert [(slot["tenant"], slot["group"], slot["size"]) for slot in partition["slots"]] == [("a", 1, 1), ("b", 1, 1)]
    changed = next(at for at, (_, event, _) in enumerate(watch.seen) if isinstance(event, PolicyChanged))
    assert any(isinstance(event, PredictorChanged) for _, event, _ in watch.seen[:changed]), (
        "believed before it is used"
    )
    assert isinstance(believed, GroupedPredictor)
    assert believed.fitted is not None
    launches = [
        [each for _, _, acts in part for each in acts if isinstance(each, Launch)]
        for part in (watch.seen[:changed], watch.seen[changed:])
    ]
    assert {launch.share.cores for launch in launches[0]} == {cores}
    groups = Counter(group_of(launch) for launch in launches[1])
    together = [launch for launch in launches[1] if groups[group_of(launch)] == 2]
    assert together, "nobody overlapped"
    assert {(launch.work.tenant, launch.share.cores) for launch in together} == {("a", cores[:1]), ("b", cores[1:])}
    for number in {group_of(launch) for launch in together}:
        assert len({launch.predicted_ns for launch in together if group_of(launch) == number}) == 1


def test_a_server_that_starts_with_a_group_believes_what_was_measured(measured: Path, tmp_path: Path) -> None:
    path, watch, cores = tmp_path / "plan.toml", Watch(), CORES[:2]
    write_plan(path, GROUP)
    settings = ServerConfig(
        device=DeviceSection(cores=cores, isolation="thread"), policy=PolicySection(name="duty_cycle")
    )
    server = Server(measured, settings, plan=open_plan(path, 0, Cores(cores)).lanes)
    server.start(watch)
    try:
        believed = server.beliefs.predictor
        assert isinstance(believed, GroupedPredictor)
        assert believed.fitted is not None
        assert isinstance(server.policy, DutyCycle)
        tenants = server.driver.read(lambda engine: engine.tenants)
        assert set(server.policy.likely_groups(tenants)) <= set(believed._answers)
        ask_together(Client(server))
    finally:
        server.stop()
    counts = Counter(group_of(launch) for launch in watch.actions(Launch))
    assert max(counts.values()) == 2


def test_the_same_plan_is_simulated_explained_and_replayed(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, trace, plan = runner(monkeypatch, capfd), measured / STATE_FOLDER / "simulated.jsonl", tmp_path / "plan.toml"
    write_plan(plan, GROUP)
    rates = "".join(f'[[tenant]]\nmodel = "{name}"\nrate = 4000.0\n' for name in "ab")
    (tmp_path / "load.toml").write_text(f"duration_s = 0.2\n{rates}")
    asked = ("simulate", tmp_path / "load.toml", measured, "--plan", plan, "--policy", "duty_cycle")
    asked = (*asked, "--cores", ",".join(map(str, CORES[:2])))
    done, out, err = run(*asked, "--trace", trace, "--json")
    assert done == 0, err
    told = json.loads(out)
    assert told["world"] == "groups"
    assert min(each["answered"] for each in told["runs"][0]["tenants"].values()) > 0
    records = list(read(trace)[1])
    launches = [action for record in records for kind, action in record.actions if kind == "Launch"]
    groups = Counter(basis_of(launch).get("group", launch["id"]) for launch in launches)
    together = next(launch for launch in launches if groups[basis_of(launch).get("group", launch["id"])] == 2)
    done, out, err = run("replay", trace)
    assert (done, err) == (0, "")
    assert "every action is the same" in out
    done, out, err = run("explain", together["queries"][0], trace)
    assert (done, err) == (0, "")
    assert f"predicted {together['predicted_ns'] / 1e6:.1f} ms" in out
    assert re.search(r"predicted as a group of 2, beside '.' on cores \d, with (no|\d+) measured group", out)
    assert json.loads(run(*asked, "--world", "table", "--json")[1])["world"] == "table"
