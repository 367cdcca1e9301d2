"""A plan on this machine: which cores, which sessions, when it changes, and what is said of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from client import Client, Watch, until
from cotenant.cli.options import chosen_of, settings_of
from cotenant.config import PlanSection, PolicySection, ServerConfig, load_server_config
from cotenant.core.actions import Launch
from cotenant.core.events import PolicyChanged
from cotenant.core.snapshot import DropRule
from cotenant.errors import ConfigError, PlanError
from cotenant.execute.errors import ModelError
from cotenant.execute.sessions import SessionSet
from cotenant.execute.worker.channel import Open, Prepare
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import make_policy
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.serve.engine.clock import VirtualClock
from cotenant.serve.engine.driver import Driver
from cotenant.serve.server import Server
from cotenant.techniques.partitions.plan.file import PlanFile, Request, plan_text
from cotenant.techniques.partitions.plan.sources import CostBasis
from cotenant.techniques.partitions.plan.tracking import TrackedRate
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
from cotenant.techniques.partitions.serve.plan_lanes import Cores, ServedPlan, lay_out, open_plan
from cotenant.techniques.partitions.serve.replan import Replanner
from cotenant.types import Outcome, Query, Tenant
from cotenant.wire.api import InferRequest, ServeError, Status
from cotenant.work import Machine, PlanLanes, Share
from cotenant.world.simulated import SimulatedExecutor, TableWorld
from plan_samples import table_costs
from repositories import config, scaled, write_model
from strict_engine import StrictEngine as Engine

MS = 1_000_000
WAIT_S = 30.0
SLO_MS = 20_000
KIND = DeviceType("cpu", ((2,), (1, 1)), 1 << 40)


def part(size: int, *slots: tuple[str, float], batch: int = 4) -> PartitionPlan:
    return PartitionPlan(size, 50 * MS, tuple(Slot(name, batch, rate) for name, rate in slots))


def device(*partitions: PartitionPlan) -> DevicePlan:
    return DevicePlan("cpu", partitions)


def loads(*names: str, rate: float = 10.0) -> tuple[Load, ...]:
    return tuple(Load(name, name, rate, SLO_MS * MS) for name in names)


def file_of(*devices: DevicePlan, names: Sequence[str] = ("a", "b")) -> PlanFile:
    kinds = tuple(KIND for _ in devices)
    return PlanFile(Request(loads(*names), kinds), Plan(devices, "by hand"), 0.1)


# --- lanes --------------------------------------------------------------------------------------------------------


def test_partitions_get_cores_and_the_rest_is_a_lane_a_core() -> None:
    laid = Cores((0, 1, 2, 3)).lanes_of(device(part(1, ("a", 5.0)), part(2, ("b", 6.0))))
    assert [lane.cores for lane in laid.lanes] == [(2,), (0, 1), (3,)]
    assert [[slot.tenant for slot in made.slots] for made in laid.rounds] == [["a"], ["b"], []]
    assert laid.rounds[1].duty_ns == 50 * MS
    assert laid.rounds[1].slots[0].rate_per_s == 6.0


def test_what_stays_of_its_size_stays_on_its_cores_those_of_its_tenants_first() -> None:
    place = Cores((0, 1, 2, 3))
    before = place.lanes_of(device(part(2, ("a", 1.0)), part(2, ("b", 1.0))))
    assert [lane.cores for lane in before.lanes] == [(0, 1), (2, 3)]
    after = place.lanes_of(device(part(1, ("c", 1.0)), part(2, ("b", 1.0), ("d", 1.0)), part(1, ("a", 1.0))), before)
    assert after.lanes[1].cores == (2, 3)
    swapped = place.lanes_of(device(part(2, ("b", 1.0)), part(2, ("a", 1.0))), before)
    assert [lane.cores for lane in swapped.lanes] == [(2, 3), (0, 1)]
    stranger = place.lanes_of(device(part(2, ("x", 1.0))), before)
    assert [lane.cores for lane in stranger.lanes] == [(0, 1), (2,), (3,)]


@given(
    first=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    second=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    count=st.integers(1, 8),
)
def test_lanes_are_disjoint_cover_the_cores_and_have_the_planned_sizes(
    first: list[int], second: list[int], count: int
) -> None:
    place = Cores(tuple(range(3, 3 + count)))
    running: PlanLanes | None = None
    for sizes in (first, second):
        plan = device(*[part(size, (f"t{n}", 1.0)) for n, size in enumerate(sizes)])
        if sum(sizes) > count:
            with pytest.raises(PlanError, match=f"there are {count}"):
                place.lanes_of(plan, running)
            return
        running = place.lanes_of(plan, running)
        assert [lane.size for lane in running.lanes] == sizes + [1] * (count - sum(sizes))
        assert sorted(core for lane in running.lanes for core in lane.cores) == list(place.cores)


def test_a_device_of_a_plan_is_found_by_its_number_and_has_its_own_loads(tmp_path: Path) -> None:
    both = file_of(device(part(1, ("a", 5.0))), device(part(2, ("b", 5.0))), names=("a", "b", "nowhere"))
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(both))
    served = open_plan(path, 1, Cores((0, 1)))
    assert served.plan == both.plan.devices[1]
    assert [load.tenant for load in served.loads] == ["b", "nowhere"]
    with pytest.raises(PlanError, match="a plan for 2 devices, and has no device number 2"):
        open_plan(path, 2, Cores((0, 1)))
    with pytest.raises(PlanError, match="there are 1"):
        open_plan(path, 1, Cores((0,)))
    strange = replace(both, plan=Plan((DevicePlan("tpu", (part(1, ("a", 1.0)),)),)))
    with pytest.raises(PlanError, match="'tpu', which has no"):
        lay_out(strange, "plan.toml", 0, Cores((0,)))


# --- settings -----------------------------------------------------------------------------------------------------


def test_options_and_the_plan_section_agree(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, chosen_of(None, plan=Path("p.toml"), device_number=2, cores="1,0"))
    assert (settings.plan.file, settings.plan.device, settings.policy.name) == ("p.toml", 2, "duty_cycle")
    assert settings.device.cores == (1, 0)
    (tmp_path / "cotenant.toml").write_text('[plan]\nfile = "p.toml"\nperiod_s = 5\nplanner = "elastic"\n')
    settings = settings_of(tmp_path)
    assert settings.plan.file == str(tmp_path / "p.toml")
    assert (settings.plan.period_s, settings.plan.planner, settings.policy.name) == (5, "elastic", "duty_cycle")
    assert settings_of(tmp_path, {"policy.name": "edf"}).policy.name == "edf"
    with pytest.raises(ConfigError, match="makes the lanes"):
        settings_of(tmp_path, {"device.lanes": "all"})
    with pytest.raises(ConfigError, match="there is no plan"):
        settings_of(tmp_path / "elsewhere", {"plan.device": 1})
    for text in ("0;1", "", "-1"):
        with pytest.raises(ConfigError, match=r"command line: device\.cores"):
            settings_of(tmp_path, chosen_of(None, cores=text))
    (tmp_path / "cotenant.toml").write_text('[device]\ncores = [0]\n[policy]\nname = "edf"\npreempt = false\n')
    words = [
        "device.lanes=[[0], [1]]",
        "device.cores = [0, 1]",
        "policy.name=overlap",
        "policy.ways=2",
        "server.host=::1",
    ]
    settings = settings_of(tmp_path, chosen_of(words, drop="none", http_port=5))
    assert (settings.device.lanes, settings.device.cores) == (((0,), (1,)), (0, 1))
    assert (settings.policy.name, settings.policy.options) == ("overlap", {"preempt": False, "ways": 2, "drop": "none"})
    assert (settings.server.host, settings.server.http_port) == ("::1", 5)
    assert settings_of(tmp_path, chosen_of(["device.lanes=all"])) == settings_of(tmp_path, chosen_of(None, lanes="all"))
    assert settings_of(tmp_path, chosen_of(None, lanes="0,1/2")).device.lanes == ((0, 1), (2,))
    for text, message in (
        ("device.index", "--set is 'device.index', expected SECTION.KEY=VALUE"),
        ("index=3", "--set is 'index=3', expected SECTION.KEY=VALUE"),
        ("device.indx=3", "command line: device: .*unknown field `indx`, expected one of cores, lanes"),
        ("devic.index=3", "command line: .*unknown field `devic`, expected one of server, device"),
        ("device.index=-3", "command line: device.index: Expected `int` >= 0"),
        ("policy.ways=3", "command line.ways: policy 'edf' has no such option"),
        ("policy.name=zzz", "command line: name is 'zzz'"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings_of(tmp_path, chosen_of([text]))
    (tmp_path / "cotenant.toml").write_text("[plan]\nperiod_s = -1\n")
    with pytest.raises(ConfigError, match=r"plan\.period_s"):
        load_server_config(tmp_path / "cotenant.toml")


# --- sessions -----------------------------------------------------------------------------------------------------

OPEN = Open("a", "a/1/model.onnx", "graphs", "x", ((1, ((0, 2),)),), 5)
WHOLE = ((0, 2),)


def test_a_session_set_asks_for_what_is_missing_and_the_next_worker_loads_it_all() -> None:
    sessions = SessionSet(OPEN)
    sent: list[Any] = []

    def answered(message: Any) -> bool:
        sent.append(message)
        sessions.end("")
        return True

    sessions.prepare(((1, WHOLE), ((0, 1), WHOLE)), {"x": (1, 8)}, answered)
    assert sent == [Prepare((((0, 1), WHOLE),), {"x": (1, 8)})]
    assert sessions.model.sessions == ((1, WHOLE), ((0, 1), WHOLE))
    sessions.prepare(((1, WHOLE),), {}, answered)
    assert len(sent) == 1  # it is there
    sessions.keep((((0, 1), WHOLE),), answered)
    assert sessions.model.sessions == (((0, 1), WHOLE),)
    assert sent[1].threads == ((0, 1),)


def test_a_refusal_leaves_the_sessions_as_they_were_and_a_lost_worker_is_not_waited_for() -> None:
    sessions = SessionSet(OPEN)

    def refused(message: Any) -> bool:
        sessions.end("no memory")
        return True

    with pytest.raises(ModelError, match="no memory"):
        sessions.prepare((((0, 1), WHOLE),), {}, refused)
    assert sessions.model == OPEN
    sessions.prepare((((0, 1), WHOLE),), {}, lambda _: False)
    assert sessions.model.sessions == ((1, WHOLE), ((0, 1), WHOLE))


# --- the server ---------------------------------------------------------------------------------------------------


def write_two(root: Path) -> Path:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        write_model(root, name, config(max_batch=4, slo_ms=SLO_MS), {1: lambda factor=factor: scaled(factor)})
    return root


def x(value: float, rows: int = 1) -> dict[str, Any]:
    return {"x": np.full((rows, 8), value, np.float32)}


PLANNED = device(part(1, ("a", 11.0)), part(1, ("b", 11.0)))


class Following:
    """A server with a plan, and a planner that answers what a test says."""

    def __init__(self, root: Path, isolation: str, answer: Plan | None = None, **section: Any) -> None:
        self.asked: list[list[Load]] = []
        self.answer = answer
        self.watch = Watch()
        self.path = root.parent / "plan.toml"
        self.path.write_text(plan_text(file_of(PLANNED)))
        plan = PlanSection(file=str(self.path), **section)
        device_section = ServerConfig().device.__class__(cores=(0, 1), isolation=isolation)
        settings = ServerConfig(device=device_section, policy=PolicySection(name="duty_cycle"), plan=plan)
        served = open_plan(self.path, 0, Cores((0, 1)))
        self.server = Server(root, settings, plan=served.lanes)
        self.follower = Replanner(
            self.server, self.path, served, plan, planners=lambda name, headroom: self, costs=self.costs
        )
        self.server.start(self.watch, self.follower)
        self.follower.start()
        self.client = Client(self.server)

    name = "told"

    def costs(self, root: Path, devices: Sequence[DeviceType]) -> CostBasis:
        known = table_costs({"cpu": {"a": {1: {1: MS, 4: MS}}, "b": {1: {1: MS, 4: MS}}}}, {"a": 1, "b": 1})
        return CostBasis(tuple(devices), known, None, "")

    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        self.asked.append(list(loads))
        if self.answer is None or sum(load.rate_per_s for load in loads) > 1000:
            return Infeasible("b", "devices", "too few cores")
        return self.answer

    def close(self) -> None:
        self.follower.stop()
        self.server.stop()


@pytest.fixture(params=["process", "thread"])
def following(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Following]:
    made = Following(write_two(tmp_path / "models"), request.param)
    yield made
    made.close()


def test_each_partition_serves_its_tenant_on_its_cores(following: Following) -> None:
    following.server.policy = make_policy(  # without loans, so that the place of each is sure
        "duty_cycle", {"backfill": False}, following.server.lanes, {"rounds": following.server.policy.rounds}
    )
    following.server.driver.post(PolicyChanged(following.server.policy))
    for _ in range(5):
        assert following.client.ask("a", x(0.5)).outcome is Outcome.ANSWERED
        assert following.client.ask("b", x(0.5)).outcome is Outcome.ANSWERED
    places = {(launch.work.tenant, launch.share.cores) for launch in following.watch.actions(Launch)}
    assert places == {("a", (0,)), ("b", (1,))}


def test_a_new_file_is_taken_over_under_load_and_no_query_is_lost(following: Following) -> None:
    stop = threading.Event()
    numbers: list[list[int]] = [[], []]

    def ask(at: int, model: str) -> None:
        while not stop.is_set():
            number = following.server.submit(InferRequest(model, x(at)), following.client.done)
            numbers[at].append(number)
            following.client.wait(number)

    threads = [threading.Thread(target=ask, args=(at, name), daemon=True) for at, name in enumerate("ab")]
    for thread in threads:
        thread.start()
    whole = device(part(2, ("a", 11.0), ("b", 11.0)))
    for version, plan in ((2, whole), (3, PLANNED), (4, whole)):
        following.path.write_text(plan_text(file_of(plan)))
        following.follower.reload()
        assert following.follower.wait_version(version, WAIT_S)
        for made in numbers:
            wanted = len(made) + 3
            until(
                lambda made=made, wanted=wanted: len(made) > wanted,  # type: ignore[misc]
                lambda: following.client.wait(numbers[0][-1]),
            )
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    ends = following.client.wait(*numbers[0], *numbers[1])
    assert {end.outcome for end in ends} == {Outcome.ANSWERED}
    assert following.client.twice == 0
    changes = [now for now, event, _ in following.watch.seen if isinstance(event, PolicyChanged)]
    assert len(changes) == 3
    used = {launch.share.cores for launch in following.watch.actions(Launch)}
    assert used == {(0,), (1,), (0, 1)}
    last = [launch for now, _, actions in following.watch.seen if now > changes[-1] for launch in actions]
    assert {each.share.cores for each in last if isinstance(each, Launch)} == {(0, 1)}
    status = following.server.plan()
    assert (status["version"], status["changes"], status["left_cores"]) == (4, 3, [])
    assert status["plan"]["partitions"][0]["cores"] == (0, 1)
    assert status["attainment"] == {"a": 1.0, "b": 1.0}
    text = following.server.metrics().decode()
    assert "cotenant_plan_version 4.0" in text
    assert "cotenant_plan_changes_total 3.0" in text


def test_a_file_that_cannot_be_used_leaves_the_plan_as_it_is(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    good = following.path.read_text()
    following.path.write_text("[plan]\n")
    following.follower.reload()
    following.path.with_suffix(".next").write_text(plan_text(file_of(device(part(2, ("a", 1.0))))))
    until(lambda: "the plan stays unchanged" in caplog.text, lambda: following.client.ask("a", x(1)))
    assert following.follower.figures().version == 1
    following.path.write_text(good)
    following.follower.reload()  # the same plan: nothing to change
    following.path.with_suffix(".next").replace(following.path)
    following.follower.reload()
    assert following.follower.wait_version(2, WAIT_S)
    assert len(following.watch.events(PolicyChanged)) == 1


def test_a_file_that_names_a_tenant_without_a_model_is_refused_by_his_name(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    strange = file_of(device(part(1, ("a", 5.0)), part(1, ("nobody", 5.0))), names=("a", "nobody"))
    following.path.write_text(plan_text(strange))
    following.follower.reload()
    until(lambda: "the plan stays unchanged" in caplog.text, lambda: following.client.ask("a", x(1)))
    assert "tenant 'nobody' has no model in" in caplog.text
    assert "expected one of a, b" in caplog.text
    assert following.follower.figures().version == 1
    assert following.watch.events(PolicyChanged) == []
    assert following.client.ask("b", x(1)).outcome is Outcome.ANSWERED


def test_a_model_that_cannot_be_read_is_no_reason_to_refuse_its_plan(tmp_path: Path) -> None:
    root, path = write_two(tmp_path / "models"), tmp_path / "plan.toml"
    path.write_text(plan_text(file_of(PLANNED)))
    (root / "b" / "config.toml").write_text("broken")
    assert open_plan(path, 0, Cores((0, 1)), root=root).plan == PLANNED


def test_a_session_that_cannot_be_made_leaves_the_policy_as_it_is(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = following.server.policy

    def refuse(*_: object) -> None:
        raise ModelError(Path("a"), "no memory", "Buy some")

    monkeypatch.setattr(following.server._executor, "prepare", refuse)
    with pytest.raises(ModelError, match="no memory"):
        following.server.change_policy(Edf(Cores((0, 1)).lanes_of(device(part(2, ("a", 1.0)))).lanes))
    assert following.server.policy is before
    assert following.client.ask("a", x(1)).outcome is Outcome.ANSWERED


def test_old_sessions_go_when_nothing_runs_on_them(tmp_path: Path) -> None:
    made = Following(write_two(tmp_path / "models"), "process")
    try:
        made.path.write_text(plan_text(file_of(device(part(2, ("a", 1.0), ("b", 1.0))))))
        made.follower.reload()
        assert made.follower.wait_version(2, WAIT_S)
        for name in "ab":
            supervisor = made.server.names.models[name][""].loaded
            assert [threads for threads, _ in supervisor._sessions.model.sessions] == [(0, 1)]  # type: ignore[attr-defined]
            assert made.client.ask(name, x(1)).outcome is Outcome.ANSWERED
    finally:
        made.close()


def test_rates_that_rise_bring_another_plan_at_the_next_period(tmp_path: Path) -> None:
    whole = Plan((device(part(2, ("a", 5000.0), ("b", 5000.0))),))
    made = Following(write_two(tmp_path / "models"), "process", whole, period_s=0.25)
    try:
        until(lambda: made.follower.wait_version(2, 0), lambda: [made.client.ask(name, x(1)) for name in "ab"])
        assert {load.tenant for load in made.asked[0]} == {"a", "b"}
        rates = made.server.plan()["rates"]
        assert all(rates[name]["ewma"] > 10 for name in "ab")
    finally:
        made.close()


def test_rates_that_fit_nowhere_are_planned_in_part_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Plan((device(part(2, ("a", 900.0), ("b", 100.0))),))
    made = Following(write_two(tmp_path / "models"), "process", whole, period_s=0.5)
    try:

        def hundred() -> None:
            numbers = [made.server.submit(InferRequest("a", x(1, rows=4)), made.client.done) for _ in range(100)]
            made.client.wait(*numbers)

        until(lambda: made.follower.wait_version(2, 0), hundred)
        status = made.server.plan()
        assert 0 < status["share"] < 1
        assert status["breaks"] == "too few cores"
        assert "tenant 'b' breaks first (devices): too few cores" in caplog.text
        planned = next(asked for asked in made.asked if sum(load.rate_per_s for load in asked) <= 1000)
        assert [load.tenant for load in planned] == ["a", "b"]
        assert "cotenant_plan_served_ratio 0." in made.server.metrics().decode()
        made.follower.stop()
        asked = len(made.asked)
        same = {tenant: TrackedRate(rate) for tenant, rate in made.follower._held.sought_per_s.items()}
        made.follower._tracker = replace(made.follower._tracker, rates=same)
        made.follower._look()
        assert len(made.asked) == asked, "what does not fit is planned again and again"
        made.follower._tracker = replace(made.follower._tracker, rates={**same, "b": TrackedRate(5000.0)})
        made.follower._look()
        assert len(made.asked) > asked
    finally:
        made.close()


def test_load_above_the_plan_is_one_line_and_stands_in_the_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four times what the plan serves, in windows that the test closes; the plan is never made anew."""
    caplog.set_level("INFO", "cotenant.plan")
    made = Following(write_two(tmp_path / "models"), "thread")
    try:
        made.follower.stop()
        [planned] = {slot.rate_per_s for lane in PLANNED.partitions for slot in lane.slots if slot.tenant == "a"}
        for times in (1, 1, 4, 4, 4, 4, 4, 1, 1, 1, 1, 1, 1):
            made.follower._rows = {"a": round(times * planned * 10), "nobody's": 7}
            made.follower._count(10 * 10**9)
            if times == 4:
                last = made.follower.figures().share
        assert last == pytest.approx(0.25)
        assert made.follower.figures().share == 1.0
        said = [text for text in caplog.messages if "tenant 'a'" in text]
        assert [text.split(":")[0] for text in said] == [
            f"tenant 'a' sends {planned * 2:.3g} rows/s, more than its planned {planned:.3g} rows/s",
            "tenant 'a' is within its planned rate again",
        ]
    finally:
        made.close()


@pytest.mark.parametrize("name", ["duty_cycle", "edf", "fair", "shares"])
def test_the_page_and_the_metrics_show_what_really_runs(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Policies that follow no rounds have the partitions of a plan alone: nothing else of it is shown."""
    root, path = write_two(tmp_path / "models"), tmp_path / "plan.toml"
    path.write_text(plan_text(file_of(PLANNED)))
    section = PlanSection(file=str(path), period_s=1000.0)
    served = open_plan(path, 0, Cores((0, 1)), root=root)
    server = Server(root, ServerConfig(policy=PolicySection(name), plan=section), plan=served.lanes)
    follower = Replanner(server, path, served, section)
    server.start(follower)
    follower.start()
    try:
        page, metrics = follower.status(), server.metrics().decode()
    finally:
        follower.stop()
        server.stop()
    is_followed = name == "duty_cycle"
    assert (page["policy"], page["is_followed"]) == (name, is_followed)
    assert page["digest"] == PLANNED.digest
    assert [each["cores"] for each in page["plan"]["partitions"]] == [(0,), (1,)]
    assert [len(each["slots"]) for each in page["plan"]["partitions"]] == [int(is_followed)] * 2
    assert page["share"] == (1.0 if is_followed else None)
    assert ("cotenant_plan_served_ratio" in metrics) == is_followed
    assert f"cotenant_plan_followed {float(is_followed)}" in metrics
    assert (f"policy '{name}' runs no rounds" in caplog.text) != is_followed


@pytest.mark.parametrize("planned_ms", [400.0, 19_999.999, SLO_MS, 20_000.5, 60_000.0])
def test_a_plan_with_other_slos_than_are_enforced_is_refused_with_both(tmp_path: Path, planned_ms: float) -> None:
    root, path = write_two(tmp_path / "models"), tmp_path / "plan.toml"
    file = file_of(PLANNED)
    first, second = file.request.loads
    changed = structs.replace(second, slo_ns=round(planned_ms * MS))
    path.write_text(plan_text(replace(file, request=replace(file.request, loads=(first, changed)))))
    if planned_ms == SLO_MS:
        assert open_plan(path, 0, Cores((0, 1)), root=root).plan == PLANNED
        return
    text = rf"tenant 'b': slo_ms is {SLO_MS} in its config.toml and {planned_ms:.9g} in the plan"
    with pytest.raises(PlanError, match=text):
        open_plan(path, 0, Cores((0, 1)), root=root)


def test_all_contradictions_of_slos_are_named_at_once(tmp_path: Path) -> None:
    root, path = write_two(tmp_path / "models"), tmp_path / "plan.toml"
    file = file_of(PLANNED)
    changed = tuple(structs.replace(load, slo_ns=300 * MS) for load in file.request.loads)
    path.write_text(plan_text(replace(file, request=replace(file.request, loads=changed))))
    with pytest.raises(PlanError) as error:
        open_plan(path, 0, Cores((0, 1)), root=root)
    assert [re.search(r"tenant '(.)'", each)[1] for each in error.value.problems] == ["a", "b"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("key", "value", "is_refused"),
    [("rate", 11.0, False), ("rate", 11.1, True), ("max_rate", 10.0, False), ("max_rate", 9.9, True)],
)
def test_rates_of_the_configuration_and_the_plan_do_not_contradict(
    tmp_path: Path, key: str, value: float, is_refused: bool
) -> None:
    root, path = write_two(tmp_path / "models"), tmp_path / "plan.toml"
    path.write_text(plan_text(file_of(PLANNED)))
    (root / "b" / "config.toml").write_text(config(max_batch=4, slo_ms=SLO_MS, more=f"{key} = {value}\n"))
    if not is_refused:
        assert open_plan(path, 0, Cores((0, 1)), root=root).plan == PLANNED
        return
    with pytest.raises(PlanError, match=rf"tenant 'b': {key} is {value:g} in its config.toml"):
        open_plan(path, 0, Cores((0, 1)), root=root)
    part_of_cluster = replace(file_of(PLANNED), plan=Plan((PLANNED,), "cluster"))
    path.write_text(plan_text(part_of_cluster))
    assert open_plan(path, 0, Cores((0, 1)), root=root).plan == PLANNED


def test_a_plan_for_gpus_is_not_laid_out_on_cores(tmp_path: Path) -> None:
    root, path = write_two(tmp_path / "models"), tmp_path / "plan.toml"
    file = file_of(PLANNED)
    devices = tuple(replace(each, kind="gpu") for each in file.request.devices)
    path.write_text(plan_text(replace(file, request=replace(file.request, devices=devices))))
    with pytest.raises(PlanError, match=r"kind 'gpu'.* kind 'cpu'.*'cotenant profile "):
        open_plan(path, 0, Cores((0, 1)), root=root)


def test_without_a_plan_there_is_none_to_show(tmp_path: Path) -> None:
    server = Server(write_two(tmp_path / "models"), ServerConfig())
    with pytest.raises(ServeError, match="runs no plan") as caught:
        server.plan()
    assert caught.value.status is Status.NOT_FOUND
    assert "cotenant_plan_version" not in server.metrics().decode()
    server.stop()


def test_slots_of_strangers_and_batches_that_are_too_large_are_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_two(tmp_path / "models")
    plan = device(part(1, ("a", 5.0), batch=64), part(1, ("nobody", 5.0)))
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(file_of(plan, names=("a", "nobody"))))
    section = PlanSection(file=str(path))
    served: ServedPlan = open_plan(path, 0, Cores((0, 1)))
    policy = PolicySection("duty_cycle", {"drop": DropRule.EXPIRED})
    server = Server(root, ServerConfig(policy=policy, plan=section), plan=served.lanes)
    follower = Replanner(server, path, served, section)
    server.start(follower)
    follower.start()
    try:
        assert "a slot of tenant 'nobody', which this server does not serve" in caplog.text
        assert "tenant 'a': the plan has batches of 64 rows, but model.max_batch is 4" in caplog.text
        assert Client(server).ask("a", x(1)).outcome is Outcome.ANSWERED
        assert Client(server).ask("b", x(1)).outcome is Outcome.ANSWERED  # not in the plan
    finally:
        follower.stop()
        server.stop()


def test_launches_are_waited_for_by_number_and_not_for_ever() -> None:
    table = TablePredictor({"a": LatencyTable((LatencyRow(0, 1, 1, 10 * MS),))})
    clock = VirtualClock()
    engine = Engine([Tenant("a", 100 * MS)], Edf((Share((0,)),)), table, Machine.cpu((0,)))
    driver = Driver(engine, SimulatedExecutor(TableWorld(table), clock), clock)
    for _ in range(2):
        driver.submit(lambda number, now: Query(number, "a", now, now + 100 * MS), {"x": np.zeros(1)}, lambda *_: None)
    [first] = driver.read(lambda engine: engine.launches)
    assert not driver.wait_ended((first,), 0.0)
    ended: list[bool] = []
    waiting = threading.Thread(target=lambda: ended.append(driver.wait_ended((first,), WAIT_S)), daemon=True)
    waiting.start()
    until(lambda: driver.read(lambda _: driver._watching) == 1, lambda: None)
    clock.run()
    waiting.join(WAIT_S)
    assert ended == [True]
