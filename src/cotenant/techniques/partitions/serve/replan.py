"""Runs a plan on this machine and follows the load: counts arrivals, plans again, and reorganises.

A thread of its own does all but the counting. It never holds the driver's lock while it plans or loads, so queries do
not wait for it. After an error, the running plan stays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from prometheus_client.core import Metric

from cotenant.config import PlanSection
from cotenant.core.actions import Action
from cotenant.core.events import Event, QueryArrived
from cotenant.errors import CotenantError, PlanError
from cotenant.execute.protocol import Timing
from cotenant.execute.threads.lanes import be_nice
from cotenant.policies.registry import make_policy, takes_rounds
from cotenant.serve.services import Host, OpenedPlan
from cotenant.techniques.partitions.plan.follow import (
    FollowSettings,
    PlanFollower,
    Reason,
    RunningPlan,
    compare,
    demanded_loads,
)
from cotenant.techniques.partitions.plan.planners import make_planner
from cotenant.techniques.partitions.plan.sources import CostBasis, costs_of_repository
from cotenant.techniques.partitions.plan.tracking import Tracker, TrackingSettings
from cotenant.techniques.partitions.plan.types import DeviceType, Plan, Planner
from cotenant.techniques.partitions.serve.plan_lanes import Cores, ServedPlan, open_plan
from cotenant.techniques.partitions.serve.plan_view import PlanFigures, plan_metrics, plan_status

WINDOWS_A_PERIOD = 2
"""Windows of counted arrivals in one period."""
_WINDOW_S = 2.0
"""Length of a window in seconds without replanning; the rates then serve the status page and metrics only."""
_NICE = 10
_STOP_S = 5.0

_log = logging.getLogger("cotenant.plan")

MakePlanner = Callable[[str, float], Planner]
FindCosts = Callable[[Path, Sequence[DeviceType]], CostBasis]


class Replanner:
    """Follows the load of a server that runs a plan. An observer of its driver; implements `PlanRun` and `PlanView`.

    `path`: the plan's file, which `reload` reads again. `stale`: use measurements of models that changed since.
    `planners` and `costs` are replaced in tests.
    """

    def __init__(
        self,
        server: Host,
        path: Path,
        served: ServedPlan,
        section: PlanSection,
        *,
        stale: bool = False,
        planners: MakePlanner = make_planner,
        costs: FindCosts | None = None,
    ) -> None:
        self._server = server
        self._path = path
        self._served = served
        self._section = section
        self._planners = planners
        self._costs = costs
        self._stale = stale
        self._place = Cores(tuple(core for device in server.machine.devices for core in device.cores))
        tracking = TrackingSettings(headroom=section.headroom)
        self._settings = FollowSettings(tracking, leave_out=False)
        self._tracker = Tracker(tracking)
        self._held = RunningPlan(Plan((served.plan,)))
        self._window_s = section.period_s / WINDOWS_A_PERIOD if section.period_s else _WINDOW_S
        self._rows: dict[str, int] = {}
        self._above: dict[str, float] = {}
        """Served share of the arriving rows, of the tenants that send more than the plan serves."""
        self._counting = threading.Lock()
        self._stopping = threading.Event()
        self._version, self._breaks = 1, ""
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="cotenant-replan", daemon=True)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """Count arriving rows by tenant."""
        if isinstance(event, QueryArrived):
            query = event.query
            with self._counting:
                self._rows[query.tenant] = self._rows.get(query.tenant, 0) + query.items
        return None

    # --- life cycle -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, once the server has started. Warns about slots that are served differently."""
        names = {tenant.name: tenant for tenant in self._server.driver.read(lambda engine: engine.tenants)}
        for partition in self._served.plan.partitions:
            for slot in partition.slots:
                tenant = names.get(slot.tenant)
                if tenant is None:
                    _log.warning("the plan has a slot of tenant %r, which this server does not serve", slot.tenant)
                elif slot.batch > tenant.max_batch:
                    _log.warning(
                        "tenant %r: the plan has batches of %d rows, but model.max_batch is %d: it gets less than its "
                        "planned rate; raise max_batch, or plan again",
                        *(slot.tenant, slot.batch, tenant.max_batch),
                    )
        if not self._is_followed:
            _log.warning(
                "policy %r runs no rounds: the plan's partitions are the lanes, its slots, batches and rates are "
                "ignored; leave --policy out to run them",
                self._server.policy.spec.name,
            )
        self._server.following = self
        self._server.divide(self._served.shares_ns)
        self._thread.start()

    def stop(self, patience_s: float = _STOP_S) -> None:
        """Make no more changes and end the thread; wait up to `patience_s` for a running planner."""
        self._stopping.set()
        self._wishes.put("stop")
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def reload(self) -> None:
        """Let the thread read the plan's file again. Safe in a signal handler."""
        self._wishes.put("reload")

    def wait_version(self, version: int, timeout_s: float) -> bool:
        """Wait until a plan of at least this number runs; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._version >= version, timeout_s)

    # --- status ---------------------------------------------------------------------------------------------------

    def figures(self) -> PlanFigures:
        """Figures of the running plan."""
        with self._changed:
            share = min((self._held.share, *self._above.values()))
            rates = self._tracker.rates
        return PlanFigures(self._version, self._version - 1, share, rates, self._is_followed)

    def status(self) -> Mapping[str, Any]:
        """Plan, rates and attainment as plain values."""
        with self._changed:
            served, breaks = self._served, self._breaks
        counters, policy = self._server.counters.by_tenant, self._server.policy.spec.name
        return plan_status(served.plan, served.lanes, self.figures(), counters, breaks, policy)

    def metrics(self) -> Iterator[Metric]:
        """Families of the metrics page."""
        return plan_metrics(self.figures())

    @property
    def _is_followed(self) -> bool:
        return takes_rounds(self._server.policy.spec.name)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        be_nice(_NICE)
        clock, windows = self._server.clock, 0
        last_ns = clock.now_ns()
        while True:
            left_s = self._window_s - (clock.now_ns() - last_ns) / 1e9
            try:
                wish = self._wishes.get(timeout=max(0.0, left_s))
            except Empty:
                wish = "window"
            if wish == "stop":
                return
            try:
                if wish == "reload":
                    self._reload()
                    continue
                now = clock.now_ns()
                self._count(now - last_ns)
                last_ns, windows = now, windows + 1
                if self._section.period_s and self._is_followed and windows % WINDOWS_A_PERIOD == 0:
                    self._look()
            except CotenantError as error:
                _log.error("the plan stays unchanged: %s", error)
            except Exception:
                _log.exception("following the load failed; the plan stays unchanged")

    def _count(self, window_ns: int) -> None:
        with self._counting:
            rows, self._rows = self._rows, {}
        with self._changed:
            self._tracker = self._tracker.after(rows, max(1, window_ns))
        if self._is_followed:
            self._compare(window_ns / 1e9)

    def _compare(self, window_s: float) -> None:
        """Log when a tenant begins to send more rows than the plan serves, and when it no longer does."""
        with self._changed:
            rates, served, before = self._tracker.rates, self._held.plan.rates_per_s, self._above
            self._above = {
                tenant: served[tenant] / rate.mean
                for tenant, rate in rates.items()
                if served.get(tenant) and rate.is_above(served[tenant], window_s, tenant in before)
            }
            above = self._above
        for tenant in rates:
            if (tenant in above) == (tenant in before):
                continue
            figures = tenant, rates[tenant].mean, served.get(tenant, 0.0)
            if tenant in above:
                _log.warning("tenant %r sends %.3g rows/s, more than its planned %.3g rows/s", *figures)
            else:
                _log.info("tenant %r is within its planned rate again: %.3g of %.3g rows/s", *figures)

    def _reload(self) -> None:
        served = open_plan(
            self._path, self._section.device, self._place, self._served.lanes, self._server.root, stale=self._stale
        )
        self._reorganise(served, RunningPlan(Plan((served.plan,))), "", f"{self._path} was read again")

    def _look(self) -> None:
        """Compare rates and plan; plan again if they differ too much."""
        served, settings = self._served, self._settings
        known = {tenant.name for tenant in self._server.driver.read(lambda engine: engine.tenants)}
        declared = [load for load in served.loads if load.tenant in known]
        silent = {load.tenant: 0.0 for load in declared}
        loads = demanded_loads(declared, silent | self._tracker.demand(), settings.floor)
        reason, self._held = compare(loads, (served.device,), self._held, settings.tracking)
        if reason is Reason.KEEP or not loads:
            return
        root, models = self._server.root, [load.model for load in loads]
        if self._costs is not None:
            basis = self._costs(root, (served.device,))
        else:
            basis = costs_of_repository(root, (served.device,), models=models, stale=self._stale)
        planner = self._planners(self._section.planner, self._section.headroom)
        step = PlanFollower(planner, basis.devices, basis.costs, settings).seek(loads, self._held, reason)
        detail = step.breaks.detail if step.breaks else ""
        if step.held is None:
            raise PlanError(f"no share of the arriving rates fits this machine: {detail}")
        if step.breaks:
            _log.warning(
                "the arriving rates do not fit: planned for %.0f %% of each; tenant %r breaks first (%s): %s",
                *(100 * step.held.share, step.breaks.tenant, step.breaks.constraint, detail),
            )
        plan = step.held.plan.devices[0]
        lanes = self._place.lanes_of(plan, served.lanes)
        rates = ", ".join(f"{load.tenant} {load.rate_per_s:.3g}/s" for load in loads)
        self._reorganise(replace(served, plan=plan, lanes=lanes), step.held, detail, f"{reason.value}: {rates}")

    def _reorganise(self, served: ServedPlan, held: RunningPlan, breaks: str, why: str) -> None:
        if self._stopping.is_set():
            return
        is_new = served.plan != self._served.plan
        if is_new:
            began = self._server.clock.now_ns()
            configured, lanes = self._server.settings.policy, served.lanes
            self._server.change_policy(
                make_policy(configured.name, configured.options, lanes.lanes, {"rounds": lanes.rounds})
            )
            took_s = (self._server.clock.now_ns() - began) / 1e9
            _log.info("plan %d runs after %.2f s (%s)", self._version + 1, took_s, why)
        self._server.divide(served.shares_ns)
        with self._changed:
            self._served, self._held, self._breaks = served, held, breaks
            self._version += is_new
            self._changed.notify_all()


class PartitionPlans:
    """Plan files with partitions and rounds. Implements PlanFiles."""

    def open(self, section: PlanSection, cores: Sequence[int], root: Path, *, stale: bool) -> ServedPlan:
        """Read a plan file and lay it out on these cores. Raises PlanError, or StaleProfileError unless `stale`."""
        return open_plan(Path(section.file or ""), section.device, Cores(tuple(cores)), root=root, stale=stale)

    def follow(self, server: Host, opened: OpenedPlan, section: PlanSection, *, stale: bool) -> Replanner:
        """The replanner of a server that runs an opened plan."""
        return Replanner(server, Path(section.file or ""), cast(ServedPlan, opened), section, stale=stale)


PLAN_FILES = PartitionPlans()
