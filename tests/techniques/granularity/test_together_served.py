"""Plans of models that are there together, served: of the repository, of applications, stale ones and broken files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from msgspec import UNSET

from application_samples import fan, write_application, x_of
from client import Client, Watch, started
from cotenant.config import DeviceSection, PolicySection, ServerConfig
from cotenant.core.actions import Enqueue, Launch
from cotenant.core.events import PolicyChanged
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.measure.load_spec import facts_of
from cotenant.measure.loader import stored_or_measured
from cotenant.measure.opened_model import open_version
from cotenant.measure.solo import CORES, Effort
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.profile_file import Profile, save_profile
from cotenant.repository import find_versions, profile_path, together_path
from cotenant.serve.models.served_models import serve_model
from cotenant.serve.server import Server
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, StoredJointPlan, Wait
from cotenant.techniques.granularity.plan.kept import read_joint_plans, store_joint_plan
from cotenant.techniques.granularity.plan.search_process import SearchRequest, search
from cotenant.techniques.granularity.serve import joint_plans
from cotenant.techniques.granularity.serve.trial_run import TrialRun, TrialRunError, check_answers
from cotenant.work import Share
from onnx_samples import Sketch, info
from repositories import config, write_model

POLICY = PolicySection("joint", {"drop": "none"})


def chain(seed: int) -> Callable[[], onnx.ModelProto]:
    """Four matrix products with something between, each a unit."""

    def make() -> onnx.ModelProto:
        s, x = Sketch(seed), "x"
        for _ in range(3):
            x = s.op("Tanh", s.op("MatMul", x, s.weight(8, 8)))
        s.op("MatMul", x, s.weight(8, 8), out="y")
        return s.model([info("x", ["batch", 8])], [info("y", ["batch", 8])])

    return make


def mixing() -> onnx.ModelProto:
    """As left was, and then less the mean of all rows."""
    s = Sketch()
    t = s.op("MatMul", "x", s.weight(8, 8))
    less = s.op("Sub", t, s.op("ReduceMean", t, axes=[0], keepdims=1))
    s.op("MatMul", less, s.weight(8, 8), out="y")
    return s.model([info("x", ["batch", 8])], [info("y", ["batch", 8])])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two models, and an application that asks both at once."""
    folder = tmp_path / "models"
    for seed, name in enumerate(("left", "right")):
        write_model(folder, name, config(max_batch=4, slo_ms=60000), {1: chain(seed)})
    write_application(folder, "fan", fan("left", "right"), slo_ms=60000)
    return folder


def keep(root: Path, graph: str = "") -> StoredJointPlan:
    """A plan of both with two rows each: left's first units in chunks, right's last behind left's."""
    members = []
    for name in ("left", "right"):
        opened = open_version(root, find_versions(root, name)[0])
        with opened.runner as model:
            members.append(JointMember(name, 2, model.unit_count, graph=graph or opened.digest))
    plan = StoredJointPlan(
        tuple(members),
        ((1, 1),),
        (Wait(1, 2, 0, 3),),
        (Chunk(0, 0, 2, (1, 1)),),
        lanes=2,
        makespan_ns=1,
        streams_ns=2,
        sequential_ns=3,
        bound_ns=1,
    )
    store_joint_plan(root, plan, plan.key)
    return plan


def launches(watch: Watch) -> list[Launch]:
    return [each for _, _, actions in watch.seen for each in actions if isinstance(each, Launch)]


@pytest.fixture
def unsought(monkeypatch: pytest.MonkeyPatch) -> list[SearchRequest]:
    """No search begins; what was asked for is given."""
    request: list[SearchRequest] = []

    def note(_: Any, each: SearchRequest) -> None:
        request.append(each)

    monkeypatch.setattr(joint_plans.JointPlanService, "_search", note)
    return request


def ask(server: Server, rows: int = 2) -> dict[str, Any]:
    answer = Client(server).ask("fan", {"x": x_of(rows=rows)})
    assert answer.reason == ""
    return dict(answer.outputs)


def expected(root: Path, rows: int = 2) -> dict[str, Any]:
    found = {}
    for output, name in (("a", "left"), ("b", "right")):
        with open_version(root, find_versions(root, name)[0]).runner as model:
            found[output] = model.run(0, model.unit_count, {"x": x_of(rows=rows)})["y"]
    return found


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_stages_that_start_together_run_by_the_plan_of_the_repository(
    root: Path, isolation: Any, unsought: list[SearchRequest]
) -> None:
    plan = keep(root)
    watch = Watch()
    device = DeviceSection(cores=(0, 1), isolation=isolation)
    server = started(root, watch, device=device, policy=POLICY)
    try:
        assert server.policy.joint_plans == (plan.plan,)  # type: ignore[attr-defined]
        [changed] = [event for _, event, _ in watch.seen if isinstance(event, PolicyChanged)]
        assert changed.policy is server.policy
        outputs = ask(server)
        for name, array in expected(root).items():
            np.testing.assert_allclose(outputs[name], array, rtol=1e-5, atol=1e-6)
        mine = launches(watch)
        assert sum(bool(each.work.rows) for each in mine) == 4  # the barrier cuts the chunks
        decided = [each for _, _, actions in watch.seen if (each := [a for a in actions if isinstance(a, Enqueue)])]
        assert len(decided) == 1, "all that waits is decided at once"
        before = len(mine)
        ask(server, rows=1)
        assert len(launches(watch)) == before + 2, "other rows have no plan"
    finally:
        server.stop()


def test_a_model_that_changed_has_its_plan_left_aside(
    root: Path, unsought: list[SearchRequest], caplog: pytest.LogCaptureFixture
) -> None:
    keep(root)
    write_model(root, "left", config(max_batch=4, slo_ms=60000), {1: chain(7)})
    with caplog.at_level(logging.WARNING, "cotenant.joint"):
        server = started(root, device=DeviceSection(cores=(0, 1), isolation="thread"), policy=POLICY)
    try:
        assert server.policy.joint_plans == ()  # type: ignore[attr-defined]
        assert "joint plan with 'left' is stale" in caplog.text
        assert set(ask(server)) == {"a", "b"}
    finally:
        server.stop()


def test_other_lanes_and_other_policies_follow_none(root: Path, unsought: list[SearchRequest]) -> None:
    keep(root)
    for policy, lanes, plans in ((POLICY, "all", ()), (PolicySection("edf"), "single", None)):
        device = DeviceSection(cores=(0, 1), isolation="thread", lanes=lanes)
        server = started(root, device=device, policy=policy)
        try:
            assert getattr(server.policy, "joint_plans", None) == plans
            cuts = [versions[""].tenant.cuts for versions in server.names.models.values()]
            assert all(len(each) == 2 for each in cuts) or plans is not None
        finally:
            server.stop()
    assert not unsought


def test_a_broken_file_is_told_and_the_models_are_served(
    root: Path, unsought: list[SearchRequest], caplog: pytest.LogCaptureFixture
) -> None:
    keep(root)
    together_path(root).write_text("format = 7")
    server = started(root, device=DeviceSection(cores=(0, 1), isolation="thread"), policy=POLICY)
    try:
        assert "no joint plan is followed" in caplog.text
        assert set(ask(server)) == {"a", "b"}
    finally:
        server.stop()


def test_rows_are_not_analysed_again_where_a_profile_of_the_model_has_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analysed: list[str] = []
    real = SegmentedModel.row_graph

    def count(self: SegmentedModel, shapes: Any) -> Any:
        analysed.append(self.name)
        return real(self, shapes)

    monkeypatch.setattr(SegmentedModel, "row_graph", count)
    quick = Effort(budget_s=0.0, min_runs=2, max_runs=2, warm_up=0)
    settings = ServerConfig(device=DeviceSection(cores=(0,)))

    def profiled() -> Profile:
        return profile_repository(root, settings, quick, fresh=False, on_step=lambda *_: None)[0]

    def told() -> tuple[int, Any]:
        """How often the model left is analysed as it is opened to be served, and what its tenant has."""
        analysed.clear()
        [found] = find_versions(root, "left")
        opened = open_version(root, found)
        with opened.runner:
            profile = stored_or_measured(root, opened, (Share((0,)),), CORES)
            told = profile.splits if profile.splits is not UNSET else opened.splits
            splits = serve_model(facts_of(opened, told), profile, preempt=True).tenant.splits
            return len(analysed), splits

    assert told()[0] == 1, "there is no profile"
    profile = profiled()
    analysed.clear()
    every = tuple(range(len(profile.models["left"].unit_ns) + 1))
    assert told() == (0, (every,))
    path, left = profile_path(root), profile.models["left"]
    before = replace(profile, models={**profile.models, "left": replace(left, splits=UNSET)})
    save_profile(path, before)
    assert told() == (1, (every,)), "of a profile of before"
    versions = {**profile.device.versions, "cotenant": "0.0.1"}
    lie = replace(left, splits=((0, 1),))
    elsewhere = replace(profile, device=replace(profile.device, versions=versions), models={"left": lie})
    save_profile(path, elsewhere)
    assert told() == (1, (every,)), "by other rules, perhaps"
    assert profiled().models["left"].splits == (every,), "and so is what a new profile takes over"
    assert told()[0] == 0
    write_model(root, "left", config(max_batch=4, slo_ms=60000), {1: mixing})
    changed = told()
    assert changed[0] == 1
    assert changed[1] != (every,)


def test_applications_get_plans_in_the_background(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is the stages that start together, with one row and with as many as both take."""
    request: list[SearchRequest] = []
    adopted = threading.Event()

    def find(_: Any, each: SearchRequest) -> StoredJointPlan | None:
        request.append(each)
        if len(each.members[0].duration_ns[0]) == 1:
            return None
        ends = [member.cuts[-1] for member in each.members]
        members = tuple(JointMember(member.model, 4, member.cuts[-1], graph=member.graph) for member in each.members)
        return StoredJointPlan(
            members, ((ends[0], 0),), lanes=2, makespan_ns=1, streams_ns=2, sequential_ns=3, bound_ns=1
        )

    real = joint_plans.JointPlanService.followed

    def followed(self: Any, policy: Any) -> Any:
        made = real(self, policy)
        if made.joint_plans:
            adopted.set()
        return made

    monkeypatch.setattr(joint_plans.JointPlanService, "_search", find)
    monkeypatch.setattr(joint_plans.JointPlanService, "followed", followed)
    server = started(root, device=DeviceSection(cores=(0, 1), isolation="thread"), policy=POLICY)
    try:
        assert adopted.wait(30)
        assert [(each.lanes, [len(m.duration_ns[0]) for m in each.members]) for each in request] == [
            (2, [1, 1]),
            (2, [4, 4]),
        ]
        assert all(member.splits == (tuple(range(len(member.cuts))),) for member in request[1].members)
        for name, array in expected(root, 4).items():
            np.testing.assert_allclose(ask(server, 4)[name], array, rtol=1e-5, atol=1e-6)
        assert read_joint_plans(root) == (), "what was only believed is not kept"
    finally:
        server.stop()
    told = msgspec.json.encode(request[1])
    assert msgspec.json.decode(told, type=SearchRequest) == request[1]


@dataclass
class IdleServer:
    root: Path

    def settle(self) -> None: ...


@pytest.mark.parametrize("late", [0, 1, 2, 5])
def test_a_search_that_is_late_is_tried_again_with_more_time(
    root: Path, monkeypatch: pytest.MonkeyPatch, late: int, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[tuple[object, float]] = []

    def find(self: joint_plans.JointPlanService, each: Any) -> None:
        tried.append((each, self._limit_s))
        if each == "late" and sum(other == "late" for other, _ in tried) <= late:
            raise TimeoutError("the search did not end")

    monkeypatch.setattr(joint_plans.JointPlanService, "_search", find)
    plans = joint_plans.JointPlanService(IdleServer(root))  # type: ignore[arg-type]
    plans._run({"a": "late", "b": "quick"})  # type: ignore[dict-item]
    times = [limit_s for each, limit_s in tried if each == "late"]
    assert times == [60.0, 120.0, 240.0][: min(late + 1, 3)]
    assert [each for each, _ in tried[:2]] == ["late", "quick"]
    assert set(plans._found) == {"a", "b"}
    assert caplog.text.count("repeated with twice the time") == min(late, 2)
    assert ("abandoned" in caplog.text) == (late > 2)


def test_a_search_in_a_process_of_its_own_answers(root: Path) -> None:
    """One long model beside a short one, where cutting the long one's rows gains nearly half."""
    member = joint_plans.MemberRequest
    long = member(
        "left", "g", (0, 3, 7), tuple(tuple(10**6 * (row + 1) for row in range(4)) for _ in range(2)), ((0, 1, 2),)
    )
    short = member("right", "h", (0, 2), ((1000, 1000, 1000, 1000),), ((0, 1),))
    request = SearchRequest((long, short), 2, 1, 1000, 100.0, evaluations=200)
    plans = joint_plans.JointPlanService(IdleServer(root))  # type: ignore[arg-type]
    found = plans._search(request)
    plans.close(time.monotonic() + 20)
    assert found == search(request)
    assert found is not None
    assert (found.members[0].units, found.members[0].graph) == (7, "g")
    assert found.makespan_ns < 0.7 * found.streams_ns
    assert found.chunks[0].member == 0


def test_a_trial_run_reports_plans_not_followed_and_other_answers(root: Path) -> None:
    plan = keep(root).plan
    other = JointPlan((JointMember("left", 2, 9), JointMember("right", 2, 9)), barriers=((1, 1),))
    settings = ServerConfig(device=DeviceSection(cores=(0, 1), isolation="thread"))
    lanes = (Share((0,)), Share((1,)))
    with TrialRun(root, settings, {"left": 2, "right": 2}, lanes, (plan, other)) as trial_run:
        found = trial_run.run(Effort(0.0, 2, 2, 0))
    assert found.plans_ns[0] is not None
    assert found.plans_ns[1] is None
    assert min(found.sequential_ns, found.streams_ns, found.plans_ns[0]) > 0
    answer = {"left": {"y": np.ones((2, 8), np.float32)}}
    check_answers(answer, {"left": {"y": answer["left"]["y"] + 1e-7}})
    with pytest.raises(TrialRunError, match="left: output 'y' differs between a joint plan and no plan"):
        check_answers(answer, {"left": {"y": 2 * answer["left"]["y"]}})


def test_a_set_that_cannot_be_run_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerConfig(device=DeviceSection(cores=(0, 1), isolation="thread"))
    lanes = (Share((0,)), Share((1,)))
    with TrialRun(root, settings, {"left": 1, "right": 1}, lanes, ()) as trial_run:
        trial_run._inputs["left"] = 1, {"x": np.ones((1, 7), np.float32)}
        with pytest.raises(TrialRunError, match="the set cannot be run: left: failed"):
            trial_run.run(Effort(0.0, 2, 2, 0))
