"""Controller of a cluster: watches the nodes, plans for the nodes present, and changes plans make-before-break."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from functools import partial
from typing import Any

from cotenant.cluster.drain import drained
from cotenant.cluster.heartbeats import GATEWAY, RAY_HEAD, Heartbeats, Question, Wait
from cotenant.cluster.interfaces import Change, ClusterSpec, ControllerSettings, Fleet, GatewayLink
from cotenant.cluster.joins import PAUSE_NS, Joins
from cotenant.cluster.load_monitor import LoadMonitor
from cotenant.cluster.node_plans import (
    assign,
    dropped_models,
    has_higher_rates,
    inventory_of,
    node_plans_of,
    place_backfilled,
    routing_table_of,
)
from cotenant.cluster.state import ClusterState
from cotenant.cluster.types import Address, ClusterError, GatewayReport, Node, NodeLostError, NodePlan, NodeReport
from cotenant.errors import CotenantError
from cotenant.techniques.partitions.plan.follow import PlanFollower, Reason, RunningPlan, Step, demanded_loads
from cotenant.techniques.partitions.plan.types import Load

_log = logging.getLogger("cotenant.cluster")
_THREADS = 32


class Controller:
    """Control loops of a cluster: one thread repeats `watch_once`, another one repeats `plan_once`.

    `now_ns`: monotonic clock. `failed`: called with a reason when the cluster cannot continue. `pool` and `wait_for`
    run and await calls; tests with simulated time pass both.
    """

    def __init__(
        self,
        fleet: Fleet,
        gateway: GatewayLink,
        work: ClusterSpec,
        settings: ControllerSettings | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        failed: Callable[[str], None] = _log.error,
        pool: Executor | None = None,
        wait_for: Wait = wait,
    ) -> None:
        self._fleet = fleet
        self._gateway = gateway
        self._work = work
        self._settings = settings or ControllerSettings()
        self._now_ns = now_ns
        self._lock = threading.RLock()
        self._state = ClusterState()
        self._monitor = LoadMonitor(work.loads, work.models, self._settings.follow.tracking)
        self._failed = failed
        self._pool = pool or ThreadPoolExecutor(_THREADS, "cotenant-cluster")
        self._heartbeats = Heartbeats(self._settings.detector, self._pool.submit, wait_for)
        self._joins = Joins(fleet, work.kinds, self._pool, self._joined, now_ns)
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let agents join, run the first plan, and start both loops. Raises ClusterError."""
        self.join_nodes()
        if not self._state.members:
            raise ClusterError("no node could join the cluster; the log has the reasons")
        self.plan_once()
        if self._state.held is None:
            raise ClusterError(f"the first plan cannot run: {self._state.breaks}")
        for name, loop in (("watch", self._watch), ("plan", self._follow)):
            thread = threading.Thread(target=loop, name=f"cotenant-cluster-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def halt(self) -> None:
        """Stop both loops; servers continue. Safe to repeat."""
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(self._settings.change_s)

    def stop(self) -> None:
        """Stop both loops, and end all agents with their servers."""
        self.halt()
        wait(self._joins.under_way(), self._settings.stop_s)
        wait([self._pool.submit(self._end, node) for node in list(self._state.members)])
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, node: str) -> None:
        try:
            self._fleet.call(node, "stop", timeout_s=self._settings.stop_s)
        except (CotenantError, TimeoutError) as error:
            _log.warning("node %r did not stop: %s; its agent is killed", node, error)
        self._fleet.drop(node)

    # --- watching ---------------------------------------------------------------------------------------------------

    def watch_once(self) -> None:
        """Send heartbeats to nodes, gateway and head of Ray concurrently, and remove lost nodes."""
        settings = self._settings.detector
        interval_s = settings.interval_ns / 1e9
        questions: dict[str, Question] = {GATEWAY: self._gateway.report, RAY_HEAD: self._fleet.check}
        for node in list(self._state.members):
            limit_s = interval_s * settings.misses
            questions[node] = partial(self._fleet.call, node, "report", timeout_s=limit_s)
        heard = [
            party for party, future in self._heartbeats.ask(questions, interval_s).items() if self._take(party, future)
        ]
        self._heartbeats.tick(self._now_ns(), questions, heard)
        self._remove_lost()
        self._publish()

    def _take(self, party: str, future: Future[Any]) -> bool:
        """Process the answer to a heartbeat; returns whether the party is healthy."""
        try:
            answer = future.result()
        except NodeLostError as error:
            self._heartbeats.died(party, str(error))
        except Exception as error:
            if isinstance(error, ClusterError) and party == RAY_HEAD:
                self._heartbeats.suspect(party)
            level = logging.ERROR if party == GATEWAY and isinstance(error, ClusterError) else logging.DEBUG
            _log.log(level, "no heartbeat of %s: %s", party, error)
        else:
            if party == GATEWAY:
                self._take_gateway_report(answer)
            return party in (GATEWAY, RAY_HEAD) or self._take_report(party, answer)
        return False

    def _take_report(self, node: str, report: NodeReport) -> bool:
        with self._lock:
            member = node in self._state.members
            silent = node in self._state.table.addresses and report.address is None
            if member and not silent:
                self._state.reports[node] = report
        if report.ended:
            self._heartbeats.died(node, report.problem)
        elif silent:  # a busy server may be slow once; repeated silence counts as missed heartbeats
            _log.warning("node %r: %s", node, report.problem or "its server has ended")
        return member and not silent and not report.ended

    def _take_gateway_report(self, report: GatewayReport) -> None:
        for node in report.suspects:
            self._heartbeats.suspect(node)
        with self._lock:
            self._monitor.observe(report, self._state.reports)

    def _remove_lost(self) -> None:
        """Remove lost nodes from the routing table, and wake the planning loop."""
        with self._lock:
            lost, state = self._heartbeats.lost(), self._state
            for party in (GATEWAY, RAY_HEAD):
                if reason := lost.pop(party, ""):
                    self._handle_lost_party(party, reason)
            if not lost:
                return
            names = tuple(lost)
            state.table = state.table.without(names)
            for name, reason in lost.items():
                _log.error("node %r is lost: %s; planning without it", name, reason)
                state.lose(name, reason)
                self._heartbeats.forget(name)
                self._joins.pause(name)
            self._gateway.set_table(state.table, names)
        for name in names:
            self._pool.submit(self._fleet.drop, name)
        self._wake.set()

    def _handle_lost_party(self, party: str, reason: str) -> None:
        self._heartbeats.forget(party)
        if party == GATEWAY:
            _log.error("the gateway is lost: %s; another gateway replaces it", reason)
            self._gateway.drop()
        elif not self._stop.is_set():
            self._stop.set()
            _log.error("the head of Ray is lost: %s; the cluster stops", reason)
            self._failed(
                f"the head of Ray has ended ({reason}), and the cluster cannot run without it: "
                "start it again, then run 'cotenant cluster up'"
            )

    def _watch(self) -> None:
        interval_ns = self._settings.detector.interval_ns
        due_ns = self._now_ns()
        while not self._stop.wait(max(0.0, (due_ns - self._now_ns()) / 1e9)):
            due_ns = max(due_ns + interval_ns, self._now_ns())
            try:
                self.watch_once()
            except Exception:
                _log.exception("a round of heartbeats failed")

    # --- planning ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        period_ns = round(self._settings.period_s * 1e9)
        due_ns = self._now_ns() + period_ns
        while True:
            self._wake.wait(max(0.0, min(due_ns - self._now_ns(), PAUSE_NS) / 1e9))
            woken = self._wake.is_set()
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                if woken or self._now_ns() >= due_ns:
                    due_ns = self._now_ns() + period_ns
                    with self._lock:
                        self._monitor.close_window(self._now_ns())
                    self.plan_once()
                self._joins.begin(self._state.members)
            except (CotenantError, TimeoutError) as error:
                _log.error("planning failed, the current plan stays: %s", error)
            except Exception:
                _log.exception("planning failed; the current plan stays")

    def join_nodes(self) -> None:
        """Start agents on nodes without one, and wait for them. A failed join is retried later."""
        self._joins.begin(self._state.members)
        wait(self._joins.under_way())

    def _joined(self, node: Node) -> None:
        """Add a node that has joined. It triggers planning, unless the current plan already serves all rates."""
        with self._lock:
            self._state.members[node.name] = node
            self._state.gone.pop(node.name, None)
            state = self._state
            whole = state.held is not None and state.held.whole and not state.lost
        self._heartbeats.watch(node.name)
        _log.info("node %r joined, device type %r", node.name, node.device)
        if not whole:
            self._wake.set()

    def plan_once(self) -> None:
        """Compare nodes and rates with the current plan, and run a new plan if they require it."""
        work, settings = self._work, self._settings.follow
        with self._lock:
            nodes = inventory_of(tuple(self._state.members.values()), self._state.parts, work.kinds)
            held, lost = self._state.held, self._state.lost
            loads = demanded_loads(work.loads, self._monitor.demand(), settings.floor)
        inventory = [work.kinds[node.device] for node in nodes]
        step = PlanFollower(work.planner, inventory, work.costs, settings).next_step(loads, held, lost)
        if step.held is not None and step.reason is Reason.KEEP:
            self._state.held = step.held
            self._repair()
        elif step.held is None:
            why = step.breaks.detail if step.breaks else "the cluster has no node"
            _log.error("no plan can serve any share of the rates: %s", why)
            self._state.breaks = why
            self._repair()
        else:
            self._run(step, step.held, loads, nodes)
        self._publish()

    def _run(self, step: Step, held: RunningPlan, loads: Sequence[Load], nodes: Sequence[Node]) -> None:
        began_ns = self._now_ns()
        try:
            self._change(held, loads, nodes)
        except NodeLostError as error:
            _log.warning("a node was lost during a change of the plan (%s): planning again", error)
            self._remove_lost()
            self._wake.set()
            return
        except (CotenantError, TimeoutError) as error:
            _log.error("the change of the plan failed, the current plan stays: %s", error)
            self._state.breaks = str(error)
            return
        took_s = (self._now_ns() - began_ns) / 1e9
        detail = step.breaks.detail if step.breaks and not held.whole else ""
        if detail:
            without = f", without {', '.join(held.left_out)}" if held.left_out else ""
            text = "the rates exceed the nodes' capacity: %.0f %% of them are planned%s: %s"
            _log.warning(text, 100 * held.share, without, detail)
        used = len(held.plan.devices)
        _log.info("a new plan runs on %d nodes after %.2f s: %s", used, took_s, step.reason.value)
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._lock:
            share = round(held.share, 3)
            self._state.changed(Change(at, step.reason.value, round(took_s, 3), used, share, held.left_out, detail))
        self._repair()

    def _change(self, held: RunningPlan, loads: Sequence[Load], nodes: Sequence[Node]) -> None:
        """Change the plan make-before-break: load all new models, switch the routing table, then unload old models.
        After a failure before the switch, all nodes that answer return to their old parts."""
        work = self._work
        with self._lock:
            old, runs = dict(self._state.parts), self._state.running()
        placed = assign(held.plan, nodes, {node: part.plan for node, part in runs.items()})
        new = node_plans_of(placed, loads, work.kinds, work.models, place_backfilled(held.left_out, placed, old))
        early = {node: part for node, part in new.items() if has_higher_rates(part, runs.get(node))}
        try:
            addresses: dict[str, Address] = self._all("prepare", new)
            self._all("apply", early)
        except NodeLostError:
            raise  # planning starts again from what the remaining nodes run
        except (CotenantError, TimeoutError):
            self._converge({node: old.get(node) for node in new})
            raise
        with self._lock:
            gone = [node for node in new if node not in self._state.members]
            if gone:
                raise NodeLostError(f"node {gone[0]!r} was lost")
            state = self._state
            version = state.table.version + 1
            state.table = routing_table_of(version, new, loads, work.models, addresses, work.applications)
            self._gateway.set_table(state.table)
            state.parts, state.addresses, state.held, state.lost = new, addresses, held, False
            left = {node: part for node, part in old.items() if node in state.members}
        self._drain({node: dropped_models(part, new.get(node)) for node, part in left.items()})
        self._all("apply", {node: part for node, part in new.items() if node not in early}, careful=False)
        self._all("release", {node: part for node, part in new.items() if node in old}, careful=False)
        self._all("pause", {node: None for node in left if node not in new}, careful=False)

    def _repair(self) -> None:
        """Correct nodes that do not run their part of the plan."""
        with self._lock:
            deviating = self._state.deviating()
        for node in deviating:
            _log.warning("node %r does not run its part of the plan: it is applied again", node)
        self._converge(deviating)

    def _converge(self, parts: Mapping[str, NodePlan | None]) -> None:
        """Make nodes run exactly these parts; None stops the server."""
        served = {node: part for node, part in parts.items() if part is not None}
        self._all("apply", served, careful=False)
        self._all("release", served, careful=False)
        self._all("pause", {node: None for node, part in parts.items() if part is None}, careful=False)

    def _all(self, method: str, parts: Mapping[str, NodePlan | None], *, careful: bool = True) -> dict[str, Any]:
        """Call a method of several agents concurrently. Raises an error if `careful`, preferring a lost node's."""
        with self._lock:
            for sent in filter(None, parts.values()):
                self._state.remember(sent.plan)
        calls = {
            node: self._pool.submit(
                self._fleet.call, node, method, *([part] if part else []), timeout_s=self._settings.change_s
            )
            for node, part in parts.items()
        }
        pending = set(calls.values())
        while pending:  # do not wait for a node that is lost meanwhile
            pending = wait(pending, self._settings.detector.interval_ns / 1e9).not_done
            pending -= {call for node, call in calls.items() if node not in self._state.members}
        found: dict[str, Any] = {}
        failure: BaseException | None = None
        for node, call in calls.items():
            error = call.exception() if call.done() else NodeLostError(f"node {node!r} was lost")
            if error is None:
                found[node], part = call.result(), parts[node]
                if method in ("apply", "pause"):
                    with self._lock:
                        self._state.record_plan(node, part.plan if part else None)
                continue
            if isinstance(error, NodeLostError):
                self._heartbeats.died(node, str(error))
                failure = error
            failure = failure or error
            _log.warning("node %r: %s failed: %s", node, method, error)
        if failure is not None and careful:
            raise failure
        return found

    def _drain(self, leaving: Mapping[str, tuple[str, ...]]) -> None:
        """Wait until no query is outstanding for the models that leave their nodes."""

        def report() -> GatewayReport:
            found = self._gateway.report()
            self._take_gateway_report(found)
            return found

        pairs = [(node, model) for node, models in leaving.items() for model in models]
        until_ns = self._now_ns() + round(self._settings.drain_s * 1e9)
        version, members = self._state.table.version, self._state.members
        for node, model in drained(report, pairs, version, members, lambda: self._now_ns() < until_ns):
            _log.warning("node %r: queries for model %r are still outstanding after drain_s", node, model)

    # --- status -------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Nodes, tenants, rates and attainment as plain values."""
        from cotenant.cluster.status import status_of

        with self._lock:
            return status_of(self._work.loads, self._state, self._monitor, self._work.planner.name)

    def _publish(self) -> None:
        import msgspec

        self._gateway.set_status(msgspec.json.encode(self.status()))
