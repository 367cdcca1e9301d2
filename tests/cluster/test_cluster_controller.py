"""The controller over agents and a gateway that only write down what they are told."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from cotenant.cluster.controller import Controller
from cotenant.cluster.detector import DetectorSettings
from cotenant.cluster.interfaces import ClusterSpec, ControllerSettings
from cotenant.cluster.types import (
    Address,
    ClusterError,
    Counts,
    GatewayReport,
    Node,
    NodeLostError,
    NodeReport,
    RoutingTable,
)
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.follow import FollowSettings
from cotenant.techniques.partitions.plan.scaling import ScalingSettings
from cotenant.techniques.partitions.plan.tracking import TrackingSettings
from cotenant.techniques.partitions.plan.types import DeviceType, Load
from plan_samples import table_costs

MS = 1_000_000
S = 1_000_000_000
CORE = DeviceType("core", ((1,),), 1 << 40)
COSTS = table_costs({"core": {name: {1: {1: 10 * MS}} for name in "abc"}}, dict.fromkeys("abc", 0))
LOADS = tuple(Load(name, name, rate, 200 * MS) for name, rate in (("a", 80.0), ("b", 70.0)))
SETTINGS = ControllerSettings(
    drain_s=5.0,
    detector=DetectorSettings(interval_ns=S, misses=3, suspect_misses=2, gateway_misses=5),
    follow=FollowSettings(
        TrackingSettings(headroom=0.0, alpha=1.0, windows=1, patience=1), ScalingSettings(margin=0.0)
    ),
)


class World:
    """Fleet and gateway, with one log of all that changes something."""

    def __init__(self, *nodes: str) -> None:
        self.machines = [Node(name, "core", name) for name in nodes]
        self.log: list[str] = []
        self.agents: set[str] = set()
        self.dead: set[str] = set()
        self.fails: dict[tuple[str, str], Exception] = {}
        self.after: dict[tuple[str, str], Exception] = {}
        """What is raised once the node has done as it was told."""
        self.parts: dict[str, Any] = {}
        """What the server of each node really runs."""
        self.loaded: dict[str, set[str]] = {}
        self.reports: dict[str, NodeReport] = {}
        self.table = RoutingTable(0, (), {})
        self.counts: dict[str, Counts] = {}
        self.under_way: list[dict[tuple[str, str], int]] = []
        self.suspects: tuple[str, ...] = ()
        self.published: dict[str, Any] = {}
        self.gateway_is_gone = False
        self.ray_problem: Exception | None = None

    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.machines)

    def join(self, node: Node) -> None:
        if (node.name, "join") in self.fails:
            raise self.fails[node.name, "join"]
        self.agents.add(node.name)

    def drop(self, node: str) -> None:
        self.agents.discard(node)

    def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        if node in self.dead or node not in self.agents:
            raise NodeLostError(f"node {node!r}: its agent ended")
        if (node, method) in self.fails:
            raise self.fails[node, method]
        if method == "report":
            if node in self.reports:
                return self.reports[node]
            return (
                NodeReport(Address(node, 1, 2), plan=self.parts[node].plan.digest)
                if node in self.parts
                else NodeReport(None)
            )
        self.log.append(f"{method} {node}" + (f" {','.join(arguments[0].tenants)}" if arguments else ""))
        if method == "prepare":
            self.parts.setdefault(node, arguments[0])
            self.loaded.setdefault(node, set()).update(arguments[0].models)
        elif method == "apply":
            self.parts[node] = arguments[0]
        elif method == "release":
            self.loaded[node].intersection_update(arguments[0].models)
        elif method in ("pause", "stop"):
            self.parts.pop(node, None)
            self.loaded.pop(node, None)
        if (node, method) in self.after:
            raise self.after[node, method]
        return Address(node, 1, 2) if method == "prepare" else None

    def set_table(self, table: RoutingTable, lost: tuple[str, ...] = ()) -> None:
        self.table = table
        routes = " ".join(f"{route.tenant}>{'+'.join(node for node, _ in route.shares)}" for route in table.routes)
        self.log.append(f"table {routes}" + (f" without {','.join(lost)}" if lost else ""))

    def set_status(self, status: bytes) -> None:
        self.published = json.loads(status)

    def check(self) -> None:
        if self.ray_problem is not None:
            raise self.ray_problem

    def report(self) -> GatewayReport:
        if self.gateway_is_gone:
            raise ClusterError("the gateway did not start")
        suspects, self.suspects = self.suspects, ()
        return GatewayReport(
            dict(self.counts), self.under_way.pop(0) if self.under_way else {}, suspects, self.table.version
        )

    @property
    def runs(self) -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
        """Tenants that each server really serves, and the models it has loaded."""
        return {node: (part.tenants, frozenset(self.loaded[node])) for node, part in self.parts.items()}

    def take_log(self) -> list[str]:
        found, self.log = self.log, []
        return found


class Rig:
    def __init__(self, *nodes: str, loads: tuple[Load, ...] = LOADS) -> None:
        self.world = World(*nodes)
        self.now_ns = 0
        models = {load.tenant: load.model.upper() for load in loads}
        work = ClusterSpec(loads, {"core": CORE}, models, COSTS, Elastic())
        self.controller = Controller(self.world, self.world, work, SETTINGS, lambda: self.now_ns)

    def begin(self) -> list[str]:
        self.controller.join_nodes()
        self.controller.plan_once()
        return self.world.take_log()

    def watch(self) -> None:
        """One interval passes."""
        self.now_ns += S
        self.controller.watch_once()

    def rates(self, **rates: float) -> None:
        """Let ten seconds pass with queries at these rates."""
        self.controller._monitor.close_window(self.now_ns)
        for tenant, rate in rates.items():
            known = self.world.counts.get(tenant, Counts())
            added = round(10 * rate)
            self.world.counts[tenant] = replace(known, offered=known.offered + added, in_time=known.in_time + added)
        for _ in range(10):
            self.now_ns += S
            self.controller.watch_once()
        self.controller._monitor.close_window(self.now_ns)


def test_the_first_plan_is_made_before_queries_are_sent() -> None:
    rig = Rig("n0", "n1", "n2")
    log = rig.begin()
    assert sorted(log[:2]) == ["prepare n0 a", "prepare n1 b"]
    assert sorted(log[2:4]) == ["apply n0 a", "apply n1 b"]
    assert log[4:] == ["table a>n0 b>n1"]
    status = rig.controller.status()
    assert [(node["node"], node["state"]) for node in status["nodes"]] == [
        ("n0", "serving"),
        ("n1", "serving"),
        ("n2", "idle"),
    ]
    assert rig.world.published == json.loads(json.dumps(status))
    rig.controller.plan_once()
    assert rig.world.take_log() == []


def test_a_lost_node_is_cut_at_once_and_its_tenants_move() -> None:
    rig = Rig("n0", "n1", "n2")
    rig.begin()
    rig.world.dead.add("n0")
    rig.controller.watch_once()
    assert rig.world.take_log() == ["table a> b>n1 without n0"]
    rig.controller.plan_once()
    log = rig.world.take_log()
    assert log.index("prepare n2 a") < log.index("apply n2 a") < log.index("table a>n2 b>n1")
    assert not any("n0" in line for line in log)
    status = rig.controller.status()
    assert status["nodes"][-1] == {"node": "n0", "state": "lost", "reason": "node 'n0': its agent ended"}
    assert [change["reason"] for change in status["changes"]] == ["the first plan", "nodes were lost"]


def test_what_does_not_fit_is_served_in_part_until_the_node_is_back() -> None:
    rig = Rig("n0", "n1")
    rig.begin()
    rig.world.dead.add("n0")
    rig.controller.watch_once()
    rig.controller.plan_once()
    assert rig.world.take_log()[-2:] == ["table a>n1 b>n1", "release n1 a,b"]
    assert 0.6 < rig.controller.status()["share"] < 0.7
    assert "a" in rig.controller.status()["breaks"]
    rig.world.dead.clear()
    rig.controller.join_nodes()
    assert "n0" not in rig.world.agents  # not at once
    rig.now_ns += 6 * S
    rig.controller.join_nodes()
    rig.controller.plan_once()
    assert rig.controller.status()["share"] == 1.0
    assert sorted(rig.world.table.addresses) == ["n0", "n1"]


def test_without_a_gateway_nodes_are_watched_all_the_same() -> None:
    rig = Rig("n0", "n1")
    rig.begin()
    rig.world.gateway_is_gone = True
    rig.world.dead.add("n0")
    rig.controller.watch_once()
    assert rig.world.take_log() == ["table a> b>n1 without n0"]


def test_silence_and_suspicion_end_a_node_as_well() -> None:
    rig = Rig("n0", "n1", "n2")
    rig.begin()
    rig.watch()
    rig.world.fails["n0", "report"] = TimeoutError()
    rig.world.suspects = ("n1",)
    rig.world.fails["n1", "report"] = TimeoutError()
    rig.watch()
    assert rig.world.take_log() == []
    rig.watch()
    assert rig.world.take_log() == ["table a>n0 b> without n1"]
    rig.watch()
    assert rig.world.take_log() == ["table a> b> without n0"]


def test_a_server_that_ended_is_a_lost_node() -> None:
    rig = Rig("n0", "n1")
    rig.begin()
    rig.world.reports["n1"] = NodeReport(None, "its server ended with status -9", ended=True)
    rig.controller.watch_once()
    assert rig.world.take_log() == ["table a>n0 b> without n1"]


def test_a_server_that_is_slow_once_is_none() -> None:
    rig = Rig("n0", "n1")
    rig.begin()
    rig.watch()
    slow = NodeReport(None, "its server does not answer: timed out")
    for _ in range(3):
        rig.world.reports["n1"] = slow
        rig.watch()
        rig.watch()
        del rig.world.reports["n1"]
        rig.watch()
    assert rig.world.take_log() == []
    rig.world.reports["n1"] = slow
    for _ in range(3):
        rig.watch()
    assert rig.world.take_log() == ["table a>n0 b> without n1"]


def test_a_node_lost_in_the_middle_of_a_change_leaves_the_table_alone() -> None:
    rig = Rig("n0", "n1", "n2")
    rig.begin()
    rig.world.dead.update(("n0", "n2"))
    rig.controller.watch_once()
    rig.world.dead.discard("n2")
    rig.world.fails["n1", "prepare"] = NodeLostError("node 'n1' is gone")
    rig.world.take_log()
    rig.controller.join_nodes()
    rig.controller.plan_once()
    log = rig.world.take_log()
    assert log[-1] == "table a> b> without n1"
    assert rig.controller.status()["changes"][-1]["reason"] == "the first plan"


def test_a_model_that_cannot_be_loaded_leaves_the_plan_as_it_is() -> None:
    rig = Rig("n0", "n1", "n2", loads=(Load("a", "a", 40.0, 200 * MS), Load("b", "b", 30.0, 200 * MS)))
    assert rig.begin()[-1] == "table a>n0 b>n0"
    rig.world.fails["n1", "prepare"] = ClusterError("model 'A' cannot be served")
    rig.rates(a=90.0, b=60.0)
    rig.controller.plan_once()
    assert not any(line.startswith("table") for line in rig.world.take_log())
    assert rig.controller.status()["breaks"] == "model 'A' cannot be served"
    rig.world.fails.clear()
    rig.controller.plan_once()
    assert len(rig.world.table.addresses) == 2
    assert rig.controller.status()["changes"][-1]["reason"] == "rates grew"


GROWING = tuple(Load(name, name, rate, 200 * MS) for name, rate in (("a", 40.0), ("b", 30.0)))
PROBLEMS = (ClusterError("it says no"), TimeoutError("too slow"))


def shown(rig: Rig) -> dict[str, list[str]]:
    """Who is served where, as the controller tells."""
    return {
        node["node"]: [slot["tenant"] for partition in node["partitions"] for slot in partition["slots"]]
        for node in rig.controller.status()["nodes"]
        if node["state"] != "idle"
    }


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("step", ["prepare", "apply"])
@pytest.mark.parametrize("when", ["fails", "after"])
@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_change_that_fails_on_one_node_is_taken_back_on_all(
    node: str, when: str, step: str, problem: Exception
) -> None:
    rig = Rig("n0", "n1", "n2", loads=GROWING)
    rig.begin()
    before, table, version = rig.world.runs, shown(rig), rig.world.table.version
    assert list(before) == ["n0"]
    getattr(rig.world, when)[node, step] = problem
    rig.rates(a=90.0, b=60.0)
    rig.controller.plan_once()
    held = {name: runs for name, runs in rig.world.runs.items() if (name, "apply") != (node, step)}
    assert {**before, **held} == before  # a node that does not take anything does not take it back either
    assert rig.world.table.version == version
    assert rig.controller.status()["breaks"] == str(problem)
    rig.controller.watch_once()
    assert shown(rig) == {name: list(tenants) for name, (tenants, _) in rig.world.runs.items() if name in table}

    getattr(rig.world, when).clear()
    rig.controller.plan_once()
    rig.controller.watch_once()
    assert len(rig.world.table.addresses) == 2
    assert {name: set(tenants) for name, (tenants, _) in rig.world.runs.items()} == {
        name: set(tenants) for name, tenants in shown(rig).items()
    }


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_node_that_took_the_plan_though_it_said_no_is_brought_back_later(problem: Exception) -> None:
    rig = Rig("n0", "n1", loads=GROWING)
    rig.begin()
    before = rig.world.runs
    rig.rates(a=90.0, b=60.0)
    rig.world.after["n0", "apply"] = problem
    rig.world.fails["n1", "pause"] = problem
    real = rig.world.call

    def once(node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        try:
            return real(node, method, *arguments, timeout_s=timeout_s)
        finally:
            if (node, method) == ("n0", "apply"):  # the server takes nothing back, for now
                rig.world.fails["n0", "apply"] = problem

    rig.world.call = once  # type: ignore[method-assign]
    rig.controller.plan_once()
    assert rig.world.runs != before
    rig.world.take_log()
    rig.rates(a=40.0, b=30.0)  # nothing asks for another plan any more, yet what runs is not what was planned
    assert shown(rig)["n0"] == list(rig.world.runs["n0"][0])
    rig.world.fails.clear()
    rig.world.after.clear()
    rig.world.call = real  # type: ignore[method-assign]
    rig.controller.plan_once()
    assert rig.world.runs == before
    assert rig.world.take_log() == ["apply n0 a,b", "release n0 a,b", "pause n1"]
    rig.controller.watch_once()
    rig.controller.plan_once()
    assert rig.world.take_log() == []
    assert shown(rig) == {"n0": ["a", "b"]} or shown(rig) == {"n0": ["b", "a"]}


@pytest.mark.parametrize("step", ["apply", "release", "pause"])
def test_what_a_node_misses_after_the_table_is_switched_is_made_up_for(step: str) -> None:
    rig = Rig("n0", "n1", "n2")
    rig.begin()
    rig.world.fails = {(node, step): ClusterError("it says no") for node in ("n0", "n1")}
    rig.rates(**({"a": 60.0, "b": 55.0} if step == "apply" else {"a": 20.0, "b": 10.0}))  # both lose, or one goes
    rig.controller.plan_once()
    assert rig.world.table.version == 2
    rig.world.fails.clear()
    rig.rates()
    rig.controller.plan_once()
    assert rig.world.runs.keys() == rig.world.table.addresses.keys()
    assert {route.tenant: route.shares for route in rig.world.table.routes} == {
        slot.tenant: ((node, slot.rate_per_s),)
        for node, part in rig.world.parts.items()
        for partition in part.plan.partitions
        for slot in partition.slots
    }


def test_scaling_down_drains_before_it_lets_go() -> None:
    rig = Rig("n0", "n1")
    rig.begin()
    rig.rates(a=20.0, b=10.0)
    rig.world.under_way = [{("n1", "B"): 2}, {("n1", "B"): 1}, {("n0", "A"): 7}]
    rig.controller.plan_once()
    log = rig.world.take_log()
    assert log[-1] == "pause n1"
    assert log.index("table a>n0 b>n0") < log.index("release n0 a,b") < log.index("pause n1")
    assert len(rig.world.under_way) == 0  # all three were looked at: n1 was empty in the last one
    assert rig.controller.status()["changes"][-1]["nodes"] == 1


def test_a_node_that_cannot_join_is_tried_again_later() -> None:
    rig = Rig("n0")
    rig.world.fails["n0", "join"] = ClusterError("no repository here")
    with pytest.raises(ClusterError, match="no node could join"):
        rig.controller.start()
    rig.world.fails.clear()
    rig.controller.join_nodes()
    assert rig.world.agents == set()
    rig.now_ns += 6 * S
    rig.controller.join_nodes()
    assert rig.world.agents == {"n0"}


def test_a_gateway_that_does_not_answer_costs_no_node() -> None:
    rig = Rig("n0", "n1")
    rig.begin()
    real = rig.world.report

    def hangs() -> GatewayReport:
        rig.now_ns += 30 * S
        raise TimeoutError("the gateway did not answer")

    for report in (hangs, hangs, real, hangs, real):
        rig.world.report = report  # type: ignore[method-assign]
        rig.watch()
    assert rig.world.take_log() == []
    assert [node["state"] for node in rig.controller.status()["nodes"]] == ["serving", "serving"]


@pytest.mark.parametrize("held", ["none", "a part", "all"])
def test_a_node_that_joins_is_planned_with_at_once_where_no_whole_plan_is_held(held: str) -> None:
    rig = Rig("n0", "n1", "n2")
    rig.begin()
    gone = {"none": ("n0", "n1", "n2"), "a part": ("n0", "n1"), "all": ("n0",)}[held]
    rig.world.dead.update(gone)
    rig.controller.watch_once()
    rig.controller.plan_once()
    rig.world.dead.clear()
    rig.controller._wake.clear()
    rig.now_ns += 6 * S
    rig.controller.join_nodes()
    assert len(rig.controller.status()["nodes"]) == 3
    assert rig.controller._wake.is_set() == (held != "all")


def test_a_node_that_hangs_while_it_joins_holds_up_no_plan() -> None:
    rig = Rig("n0", "n1", "n2")
    rig.begin()
    rig.world.dead.add("n2")
    rig.controller.watch_once()
    rig.world.dead.clear()
    rig.now_ns += 6 * S
    hung, real = threading.Event(), rig.world.join

    def hangs(node: Node) -> None:
        assert hung.wait(60)
        real(node)

    rig.world.join = hangs  # type: ignore[method-assign]
    rig.controller._joins.begin(rig.controller._state.members)
    rig.controller._joins.begin(rig.controller._state.members)
    [joining] = rig.controller._joins.under_way()
    rig.world.dead.add("n0")
    rig.controller.watch_once()
    rig.controller.plan_once()
    assert sorted(rig.world.table.addresses) == ["n1"]
    hung.set()
    joining.result(60)
    rig.controller.plan_once()
    assert sorted(rig.world.table.addresses) == ["n1", "n2"]


def test_a_node_that_hangs_in_a_change_holds_up_no_other_plan_once_it_is_lost() -> None:
    rig = Rig("n0", "n1", "n2")
    rig.begin()
    rig.world.dead.add("n0")
    rig.controller.watch_once()
    real, reached, hung = rig.world.call, threading.Event(), threading.Event()

    def call(node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        if (node, method) == ("n2", "prepare"):
            reached.set()
            assert hung.wait(60)
        return real(node, method, *arguments, timeout_s=timeout_s)

    rig.world.call = call  # type: ignore[method-assign]
    planning = threading.Thread(target=rig.controller.plan_once)
    planning.start()
    assert reached.wait(60)
    rig.world.dead.add("n2")
    rig.controller.watch_once()
    planning.join(60)
    assert not planning.is_alive()
    rig.controller.plan_once()
    assert sorted(rig.world.table.addresses) == ["n1"]
    hung.set()


def test_stop_ends_every_agent() -> None:
    rig = Rig("n0", "n1")
    rig.begin()
    rig.controller.stop()
    assert sorted(rig.world.take_log()) == ["stop n0", "stop n1"]
    assert rig.world.agents == set()
