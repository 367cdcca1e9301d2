"""Who counts as lost when controller, gateway, nodes and the head of Ray stall at random, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cotenant.cluster.controller import Controller
from cotenant.cluster.detector import DetectorSettings
from cotenant.cluster.heartbeats import GATEWAY, RAY_HEAD
from cotenant.cluster.interfaces import ClusterSpec, ControllerSettings
from cotenant.cluster.types import Address, ClusterError, Counts, GatewayReport, Node, NodeReport, RoutingTable
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.types import DeviceType, Load
from plan_samples import table_costs

MS = 1_000_000
INTERVAL_NS = 500 * MS
DETECTOR = DetectorSettings(INTERVAL_NS, misses=7, suspect_misses=3, gateway_misses=60)
NODES = ("steady", "suspected", "mortal")
"""`steady` stalls long, `suspected` stalls briefly and is called broken by the gateway, `mortal` may be gone."""
LONGEST = {"steady": DETECTOR.misses - 2, "suspected": DETECTOR.suspect_misses - 2, "mortal": DETECTOR.misses - 2}
"""Intervals that a party may be silent and still answers whatever reaches it in time."""


class Simulated(Executor):
    """Fleet, gateway, head of Ray, and the machine of the controller, which may not run for a while."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.stalls: dict[str, list[tuple[int, int]]] = {}
        """From when to when a party answers nothing: what it answered before is not called back."""
        self.gone: set[str] = set()
        self.refused = False
        """Whether the head of Ray refuses connections."""
        self.suspects: tuple[str, ...] = ()
        self.stall_ns = 0
        """How long the controller does not run at its next wait."""
        self.open: list[tuple[str, int, int, Future[Any], Callable[[], Any]]] = []
        """Party, when it answers, when the question times out, the future, and what makes the answer."""
        self.table = RoutingTable(0, (), {})
        self.gateways_dropped = 0

    # --- the machine of the controller

    def submit(self, fn: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        party, limit_ns = "", 0
        if fn == self.report:
            party, limit_ns = GATEWAY, 30_000 * MS
        elif fn == self.check:
            party, limit_ns = RAY_HEAD, 30_000 * MS
        elif isinstance(fn, partial) and fn.args[1] == "report":
            party, limit_ns = fn.args[0], round(fn.keywords["timeout_s"] * 1e9)
        if party:
            self.open.append((party, self.now_ns + MS, self.now_ns + limit_ns, future, fn))
        else:
            future.set_result(fn(*arguments, **options))
        return future

    def answers_at(self, party: str, reached_ns: int) -> float:
        if party in self.gone:
            return math.inf
        return max([reached_ns, *(end for begin, end in self.stalls.get(party, ()) if begin <= reached_ns)]) + MS

    def stall(self, party: str, length_ns: float) -> None:
        """From now on, unless it stalled a moment ago."""
        stalls = self.stalls.setdefault(party, [])
        if not stalls or stalls[-1][1] < self.now_ns - 2 * INTERVAL_NS:
            stalls.append((self.now_ns, self.now_ns + round(length_ns)))

    def wait_for(self, futures: Collection[Future[Any]], limit_s: float) -> None:
        """Let time pass until all have answered, `limit_s` at most, and longer where the controller stalls."""
        until_ns = self.now_ns + round(limit_s * 1e9)
        stall_ns, self.stall_ns = self.stall_ns, 0
        awaited = [each for each in self.open if each[3] in futures]
        latest = max((self.answers_at(party, reached) for party, reached, *_ in awaited), default=self.now_ns)
        slept_ns = self.now_ns
        self.now_ns = round(min(until_ns, max(latest, self.now_ns)))
        if stall_ns:  # it begins at once: what comes meanwhile is not read yet, and what times out has timed out
            self.now_ns = max(self.now_ns, slept_ns + stall_ns)
        left = []
        for party, reached_ns, limit_ns, future, question in self.open:
            at_ns = self.answers_at(party, reached_ns)
            if at_ns <= (slept_ns if stall_ns else self.now_ns):
                try:
                    future.set_result(question())
                except ClusterError as error:
                    future.set_exception(error)
            elif self.now_ns >= limit_ns:
                future.set_exception(TimeoutError(f"{party} did not answer"))
            else:
                left.append((party, reached_ns, limit_ns, future, question))
        self.open = left

    # --- Fleet

    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(name, "core", name) for name in NODES)

    def join(self, node: Node) -> None: ...

    def drop(self, node: str = "") -> None:
        self.gateways_dropped += not node

    def check(self) -> None:
        if self.refused:
            raise ClusterError("refused")

    def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        return NodeReport(Address(node, 1, 2)) if method == "report" else Address(node, 1, 2)

    # --- GatewayLink

    def set_table(self, table: RoutingTable, lost: tuple[str, ...] = ()) -> None:
        self.table = table

    def set_status(self, status: bytes) -> None: ...

    def report(self) -> GatewayReport:
        suspects, self.suspects = self.suspects, ()
        return GatewayReport({"a": Counts()}, {}, suspects, self.table.version)


class Watching(RuleBasedStateMachine):
    """No stall of anything costs a node that answers; a node that is gone is found."""

    @initialize()
    def begin(self) -> None:
        self.world = world = Simulated()
        self.sentences: list[str] = []
        load = Load("a", "a", 1.0, 200 * MS)
        costs = table_costs({"core": {"a": {1: {1: MS}}}}, {"a": 0})
        work = ClusterSpec((load,), {"core": DeviceType("core", ((1,),), 1 << 40)}, {"a": "a"}, costs, Elastic())
        control = ControllerSettings(detector=DETECTOR)
        self.controller = Controller(
            *(world, world, work, control, lambda: world.now_ns),  # type: ignore[arg-type]
            failed=self.sentences.append,
            pool=world,
            wait_for=world.wait_for,
        )
        self.controller.join_nodes()
        self.last_ns: int | None = None
        self.counted: dict[str, int] = {}
        """On-time intervals since a party has been gone."""

    @rule(intervals=st.integers(1, 12))
    def watch(self, intervals: int) -> None:
        for _ in range(intervals):
            began_ns = self.world.now_ns
            self.controller.watch_once()
            ended_ns = self.world.now_ns
            if self.last_ns is not None and ended_ns - self.last_ns <= 2 * INTERVAL_NS:
                self.counted = {party: count + 1 for party, count in self.counted.items()}
            self.last_ns = ended_ns
            self.world.now_ns = max(ended_ns, began_ns + INTERVAL_NS)

    @rule(intervals=st.floats(0.1, 200))
    def the_controller_stalls_in_a_question(self, intervals: float) -> None:
        self.world.stall_ns = round(intervals * INTERVAL_NS)

    @rule(times=st.integers(2, 12), intervals=st.floats(0.1, 20))
    def the_controller_runs_now_and_then(self, times: int, intervals: float) -> None:
        for _ in range(times):
            self.the_controller_stalls_in_a_question(intervals)
            self.watch(1)

    @rule(intervals=st.floats(0.1, 200))
    def the_controller_stalls_between_questions(self, intervals: float) -> None:
        self.world.now_ns += round(intervals * INTERVAL_NS)

    @rule(node=st.sampled_from(NODES), part=st.floats(0.01, 1.0))
    def a_node_stalls(self, node: str, part: float) -> None:
        self.world.stall(node, part * LONGEST[node] * INTERVAL_NS)

    @rule(party=st.sampled_from((GATEWAY, RAY_HEAD)), intervals=st.floats(0.1, DETECTOR.gateway_misses - 2))
    def another_stalls(self, party: str, intervals: float) -> None:
        self.world.stall(party, intervals * INTERVAL_NS)

    @rule()
    def the_gateway_suspects(self) -> None:
        self.world.suspects = ("suspected",)

    @rule()
    def a_node_goes(self) -> None:
        self.world.gone.add("mortal")
        self.counted.setdefault("mortal", 0)

    @invariant()
    def who_answers_is_never_lost(self) -> None:
        if hasattr(self, "controller"):
            members = self.controller._state.members
            assert {"steady", "suspected"} <= set(members), self.controller._state.gone
            assert "mortal" in members or "mortal" in self.world.gone
            assert self.world.gateways_dropped == 0
            assert self.sentences == []

    @invariant()
    def who_is_gone_is_found(self) -> None:
        if hasattr(self, "controller") and self.counted.get("mortal", 0) > DETECTOR.misses + 1:
            assert "mortal" not in self.controller._state.members


Watching.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWatching = Watching.TestCase


def watching() -> Watching:
    machine = Watching()
    machine.begin()
    return machine


def test_a_gateway_that_hangs_for_good_is_replaced_and_costs_no_node() -> None:
    machine = watching()
    machine.world.gone.add(GATEWAY)
    machine.watch(DETECTOR.gateway_misses - 1)
    assert machine.world.gateways_dropped == 0
    machine.watch(3)
    assert machine.world.gateways_dropped == 1
    assert set(machine.controller._state.members) == set(NODES)


def test_a_head_of_ray_that_is_gone_ends_the_cluster_with_one_sentence() -> None:
    machine = watching()
    machine.world.refused = True
    machine.watch(20)
    [sentence] = machine.sentences
    assert "the head of Ray has ended" in sentence
    assert "cotenant cluster up" in sentence
    assert set(machine.controller._state.members) == set(NODES)
