"""Applications under a plan: whose the loads of stages are, the deadlines of stages, and rates that are followed."""

from __future__ import annotations

import json
import signal
import threading
import tomllib
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from application_samples import CHAIN, chain, write_application, write_models, x_of
from client import Client, Watch, until
from commands import Run
from cotenant.config import DeviceSection, PlanSection, PolicySection, ServerConfig
from cotenant.core.events import QueryArrived
from cotenant.errors import PlanError
from cotenant.repository import trace_path
from cotenant.serve.server import Server
from cotenant.techniques.partitions.plan.application import Application, Stage
from cotenant.techniques.partitions.plan.file import KnownApplication, PlanFile, Request, parse_request, plan_text
from cotenant.techniques.partitions.plan.sources import CostBasis, read_profile_costs
from cotenant.techniques.partitions.plan.types import (
    Costs,
    DevicePlan,
    DeviceType,
    Infeasible,
    Load,
    PartitionPlan,
    Plan,
    Slot,
)
from cotenant.techniques.partitions.serve.plan_lanes import Cores, lay_out, open_plan
from cotenant.techniques.partitions.serve.plan_names import shares_of, stage_tenants
from cotenant.techniques.partitions.serve.replan import Replanner
from cotenant.trace import read
from cotenant.types import Outcome
from cotenant.wire.client import infer_once
from plan_samples import table_costs
from processes import WAIT_S, serving
from repositories import SLO_MS, config, scaled, write_model

MS = 1_000_000
KIND = DeviceType("cpu", ((2,), (1, 1)), 1 << 40)
STAGES = (Stage("first", "twice"), Stage("second", "thrice", ("first",)))


def request_of(*more: Load, slo_ms: float = SLO_MS, shares_ms: tuple[float, float] = (8_000, 9_000)) -> Request:
    loads = tuple(
        Load(f"chain.{stage.name}", stage.model, 10.0, round(share * MS))
        for stage, share in zip(STAGES, shares_ms, strict=True)
    )
    application = Application("chain", round(slo_ms * MS), 10.0, STAGES)
    return Request((*loads, *more), (KIND,), (application,))


def plan_of(*names: str) -> Plan:
    return Plan((DevicePlan("cpu", (PartitionPlan(2, 50 * MS, tuple(Slot(name, 4, 11.0) for name in names)),)),))


LOADS = "chain.first", "chain.second"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = write_models(tmp_path / "models", "twice", "thrice", "half", "join")
    write_application(root, "chain", CHAIN)
    return root


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_stage_is_its_models_tenant_unless_one_is_called_like_it(root: Path) -> None:
    assert stage_tenants(root, request_of()) == {"chain.first": "twice", "chain.second": "thrice"}
    write_model(root, "own", config("chain.second"), {1: lambda: scaled(3.0)})
    write_application(root, "chain", CHAIN.replace('"thrice"', '"own"'))
    assert stage_tenants(root, request_of()) == {"chain.first": "twice"}


def test_an_application_that_is_not_in_the_repository_is_left_to_its_clients(root: Path) -> None:
    other = Application("elsewhere", 100 * MS, 1.0, STAGES)
    assert stage_tenants(root, Request((), (KIND,), (other,))) == {}
    write_application(root, "chain", CHAIN.replace("first.y", "nobody.y"))
    assert stage_tenants(root, request_of()) == {}


def test_the_plan_is_laid_out_with_the_tenants_that_serve_it(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(PlanFile(request_of(), plan_of(*LOADS), 0.1)))
    served = open_plan(path, 0, Cores((0, 1)), root=root)
    assert [slot.tenant for slot in served.plan.partitions[0].slots] == ["twice", "thrice"]
    assert [slot.tenant for slot in served.lanes.rounds[0].slots] == ["twice", "thrice"]
    assert [(load.tenant, load.model, load.slo_ns) for load in served.loads] == [
        ("twice", "twice", 8_000 * MS),
        ("thrice", "thrice", 9_000 * MS),
    ]
    assert served.shares_ns == {"chain": {"first": 8_000 * MS, "second": 9_000 * MS}}


def test_two_loads_of_one_tenant_are_refused_with_what_mends_it(root: Path, tmp_path: Path) -> None:
    request = request_of(Load("thrice", "thrice", 5.0, 100 * MS))
    file = PlanFile(request, plan_of(*LOADS, "thrice"), 0.1)
    tenants = stage_tenants(root, request)
    with pytest.raises(PlanError) as caught:
        lay_out(file, "plan.toml", 0, Cores((0, 1)), None, tenants)
    text = str(caught.value)
    assert "plan.toml: the loads 'chain.second' and 'thrice' would both be served by tenant 'thrice'" in text
    assert "tenant.name = 'chain.second'" in text
    write_model(root, "own", config("chain.second"), {1: lambda: scaled(3.0)})  # as it says
    write_application(root, "chain", CHAIN.replace('"thrice"', '"own"'))
    served = lay_out(file, "plan.toml", 0, Cores((0, 1)), None, stage_tenants(root, request))
    assert [slot.tenant for slot in served.plan.partitions[0].slots] == ["twice", "chain.second", "thrice"]


def test_shares_that_are_not_whole_are_none() -> None:
    request = request_of()
    assert shares_of(request) == {"chain": {"first": 8_000 * MS, "second": 9_000 * MS}}
    assert shares_of(Request(request.loads[:1], (KIND,), request.applications)) == {}


# --- serving ----------------------------------------------------------------------------------------------------------


class Following:
    """A server with the plan of the chain, and a planner that answers what a test says."""

    name = "told"

    def __init__(self, root: Path, **section: Any) -> None:
        self.path = root.parent / "plan.toml"
        self.write(request_of())
        self.asked: list[list[Load]] = []
        self.replanned = threading.Event()
        self.watch = Watch()
        plan = PlanSection(file=str(self.path), **section)
        device = DeviceSection(cores=(0, 1), isolation="thread")
        settings = ServerConfig(device=device, policy=PolicySection(name="duty_cycle"), plan=plan)
        served = open_plan(self.path, 0, Cores((0, 1)), root=root)
        self.server = Server(root, settings, plan=served.lanes)
        self.follower = Replanner(
            self.server, self.path, served, plan, planners=lambda name, headroom: self, costs=self.costs
        )
        self.server.start(self.watch, self.follower)
        self.follower.start()
        self.client = Client(self.server)

    def write(self, request: Request) -> None:
        self.path.write_text(plan_text(PlanFile(request, plan_of(*LOADS), 0.1)))

    def costs(self, root: Path, devices: Sequence[DeviceType]) -> CostBasis:
        known = {name: {1: {1: MS, 4: MS}} for name in ("twice", "thrice")}
        return CostBasis(tuple(devices), table_costs({"cpu": known}, {"twice": 1, "thrice": 1}), None, "")

    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        self.asked.append(list(loads))
        return plan_of("thrice", "twice")

    def shares(self) -> list[float]:
        """Deadlines of the stages of one more query, in ms after its arrival."""
        before = len(self.watch.events(QueryArrived))
        answer = self.client.ask("chain", {"x": x_of()})
        assert answer.outcome is Outcome.ANSWERED
        queries = [event.query for event in self.watch.events(QueryArrived)[before:]]
        arrival = min(query.arrival_ns for query in queries)
        return [round((query.deadline_ns - arrival) / MS, -1) for query in queries]

    def close(self) -> None:
        self.follower.stop()
        self.server.stop()


def test_deadlines_of_stages_are_those_of_the_plan(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Following(root)
    try:
        assert made.shares() == [8_000, 17_000]
        assert "not served here" not in caplog.text
        made.write(request_of(shares_ms=(5_000, 15_000)))
        made.follower.reload()
        shares = made.server.names
        until(lambda: shares._shares_ns["chain"]["first"] == 5_000 * MS, made.shares)
        assert made.shares() == [5_000, 20_000]
        status = made.server.plan()
        assert status["attainment"]["chain"] == 1.0
        assert [slot["tenant"] for slot in status["plan"]["partitions"][0]["slots"]] == ["twice", "thrice"]
    finally:
        made.close()


def test_rates_of_stages_are_followed_and_planned_for(root: Path) -> None:
    made = Following(root, period_s=0.2)
    try:
        until(lambda: made.follower.wait_version(2, 0), made.shares)
        asked = {load.tenant: load for load in made.asked[0]}
        assert list(asked) == ["twice", "thrice"]
        assert asked["twice"].rate_per_s > 10.0
        assert asked["twice"].slo_ns == 8_000 * MS
        rates = made.server.plan()["rates"]
        assert rates["twice"]["ewma"] == pytest.approx(rates["thrice"]["ewma"], rel=0.5)
        assert made.shares() == [8_000, 17_000]
    finally:
        made.close()


def test_a_plan_of_other_stages_leaves_the_deadlines_to_the_predictor(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(root, ServerConfig(device=DeviceSection(isolation="thread")))
    server.start()
    try:
        server.divide({"chain": {"one": 5, "two": 5}, "unknown": {"x": 1}})
        assert "the stages one, two of application 'chain', but its stages are first, second" in caplog.text
        answer = Client(server).ask("chain", {"x": x_of()})
        assert answer.outputs["y"] == pytest.approx(chain(x_of())[0], rel=1e-5)
    finally:
        server.stop()


# --- planning ---------------------------------------------------------------------------------------------------------

TENANTS = """
[[device]]
name = "cpu"
cores = 2

[[application]]
name = "chain"
rate = 2
"""


def test_what_the_file_leaves_out_is_known_from_elsewhere() -> None:
    known = KnownApplication(100 * MS, STAGES)
    [application] = parse_request(TENANTS, "tenants.toml", applications={"chain": known}).applications
    assert (application.slo_ns, application.stages, application.rate_per_s) == (100 * MS, STAGES, 2.0)
    own = TENANTS + 'slo_ms = 7\n[[application.stage]]\nname = "only"\nmodel = "m"\n'
    [application] = parse_request(own, "tenants.toml", applications={"chain": known}).applications
    assert (application.slo_ns, application.stages) == (7 * MS, (Stage("only", "m"),))
    with pytest.raises(PlanError, match=r"application\[0\]: .*missing required field `slo_ms`"):
        parse_request(TENANTS, "tenants.toml")
    with pytest.raises(PlanError, match=r"application\[0\]: .*missing required field `stage`"):
        parse_request(TENANTS + "slo_ms = 7\n", "tenants.toml")
    with pytest.raises(PlanError, match=r"application\[0\]: .*missing required field `slo_ms`"):
        parse_request(own.replace("slo_ms = 7", ""), "tenants.toml")


def test_a_repository_knows_its_applications(root: Path, run: Run) -> None:
    done, _, err = run("profile", root, "--budget", "0.05")
    assert done == 0, err
    write_application(root, "broken", "[application]\n")
    known = read_profile_costs(root).applications
    assert known == {"chain": KnownApplication(SLO_MS * MS, STAGES)}
    tenants = root.parent / "tenants.toml"
    tenants.write_text(TENANTS)
    status, out, err = run("plan", tenants, "--profiles", root, "--json", "--quick", "-o", root.parent / "plan.toml")
    assert status == 0, err
    assert {each["tenant"] for each in json.loads(out)["tenants"]} == {"chain.first", "chain.second"}
    served = open_plan(root.parent / "plan.toml", 0, Cores((0, 1)), root=root)
    assert {load.tenant for load in served.loads} == {"twice", "thrice"}
    assert sum(served.shares_ns["chain"].values()) == pytest.approx(SLO_MS * MS, abs=2)


def test_an_application_is_planned_and_served_by_its_plan(tmp_path: Path, run: Run) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN)
    (tmp_path / "tenants.toml").write_text(
        '[[device]]\nname = "cpu"\ncores = 1\n\n[[application]]\nname = "chain"\nrate = 2\n'
    )
    plan = tmp_path / "plan.toml"
    done, _, err = run("profile", root, "--budget", "0.05")
    assert done == 0, err
    done, _, err = run("plan", tmp_path / "tenants.toml", "--profiles", root, "--quick", "-o", plan)
    assert done == 0, err
    with serving(root, "--plan", str(plan), "--cores", "0") as process:
        for seed in range(3):
            outputs = infer_once(process.url, "chain", {"x": x_of(seed)})
            np.testing.assert_allclose(outputs["y"], chain(x_of(seed))[0], rtol=1e-5)
        with urllib.request.urlopen(f"{process.url}/v2/cotenant/plan", timeout=WAIT_S) as answer:
            status = json.load(answer)
        assert process.end(signal.SIGTERM) == 0
        assert not [entry for entry in process.logs if "not served here" in entry["message"]]
    slots = [slot["tenant"] for part in status["plan"]["partitions"] for slot in part["slots"]]
    assert sorted(slots) == ["thrice", "twice"]
    assert status["attainment"]["chain"] == 1.0
    shares = {each["name"]: each["slo_ms"] for each in tomllib.loads(plan.read_text())["tenant"]}
    records = list(read(trace_path(root))[1])
    whole = next(record.event for record in records if record.kind == "ApplicationArrived")
    first = next(record.event["query"] for record in records if record.kind == "QueryArrived")
    assert first["deadline_ns"] - whole["arrival_ns"] == round(shares["chain.first"] * 1e6)
    workload = tmp_path / "workload.toml"
    workload.write_text('duration_s = 2.0\n[[tenant]]\nmodel = "chain"\nrate = 5.0\n')
    done, out, err = run("simulate", workload, root, "--plan", plan, "--cores", "0", "--json")
    assert done == 0, err
    [simulated] = json.loads(out)["runs"]
    assert simulated["tenants"]["chain"]["attainment"] == 1.0
