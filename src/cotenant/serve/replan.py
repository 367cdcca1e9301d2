"""Runs a plan on this machine and follows the load: tracks rates, plans anew when they ask for it, and reorganises.

Everything but the counting of arrivals happens on a thread of its own, off the way of queries: it never holds the
driver's lock while it plans or loads. When something goes wrong, the plan that runs goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from cotenant.config import PlanSection, make_policy
from cotenant.core.actions import Action
from cotenant.core.events import Event, QueryArrived
from cotenant.errors import CotenantError
from cotenant.execute.lanes import be_nice
from cotenant.execute.protocol import Timing
from cotenant.plan.fitting import Fitted, largest_fit
from cotenant.plan.planners import make_planner
from cotenant.plan.sources import Grounds, costs_of_repository
from cotenant.plan.tracking import Look, Tracker, TrackingSettings, look
from cotenant.plan.types import DeviceType, Plan, PlanError, Planner
from cotenant.serve.plan_lanes import Cores, ServedPlan, open_plan
from cotenant.serve.plan_view import PlanFigures, plan_status
from cotenant.serve.server import Server

WINDOWS_A_PERIOD = 2
"""Windows, in which arrivals are counted, of one period."""
_WINDOW_S = 2.0
"""Length of a window where the plan is never made anew: the rates are for others to look at then."""
_LEAST_SHARE = 0.05
"""Part of the rate in the plan's file that a tenant keeps a slot for when nothing comes: it may come back."""
_NICE = 10
_STOP_S = 5.0

_log = logging.getLogger("cotenant.plan")

MakePlanner = Callable[[str, float], Planner]
FindCosts = Callable[[Path, Sequence[DeviceType]], Grounds]


class Replanner:
    """Follows the load of a server that runs a plan. An observer of its driver; implements `PlanView`.

    `path` is the plan's file, which `reload` reads again. Planners and costs may be given for tests.
    """

    def __init__(
        self,
        server: Server,
        path: Path,
        served: ServedPlan,
        section: PlanSection,
        *,
        planners: MakePlanner = make_planner,
        costs: FindCosts = costs_of_repository,
    ) -> None:
        self._server = server
        self._path = path
        self._served = served
        self._section = section
        self._planners = planners
        self._costs = costs
        self._place = Cores(server.cores)
        self._settings = TrackingSettings(
            headroom=section.headroom, hysteresis=section.hysteresis, patience=section.patience
        )
        self._tracker = Tracker(self._settings)
        self._window_s = section.period_s / WINDOWS_A_PERIOD if section.period_s else _WINDOW_S
        self._rows: dict[str, int] = {}
        self._counting = threading.Lock()
        self._calm = 0
        self._aim: dict[str, float] = {}
        """Rates, headroom included, for which a plan was last sought, in part if need be."""
        self._stopping = threading.Event()
        self._version, self._share, self._breaks = 1, 1.0, ""
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="cotenant-replan", daemon=True)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """See Observer: count what arrives."""
        if isinstance(event, QueryArrived):
            query = event.query
            with self._counting:
                self._rows[query.tenant] = self._rows.get(query.tenant, 0) + query.items
        return None

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to follow, once the server has started."""
        names = {tenant.name: tenant for tenant in self._server.driver.read(lambda engine: engine.tenants)}
        for partition in self._served.plan.partitions:
            for slot in partition.slots:
                tenant = names.get(slot.tenant)
                if tenant is None:
                    _log.warning("the plan has a slot of tenant %r, who is not served here", slot.tenant)
                elif slot.batch > tenant.max_batch:
                    _log.warning(
                        "the plan has batches of %d rows of tenant %r, whose model.max_batch is %d: less is served",
                        *(slot.batch, slot.tenant, tenant.max_batch),
                    )
        self._server.following = self
        self._server.divide(self._served.shares_ns)
        self._thread.start()

    def stop(self) -> None:
        """Change nothing any more, and let the thread end; a planner at work is not waited for long."""
        self._stopping.set()
        self._wishes.put("stop")
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def reload(self) -> None:
        """Read the plan's file again, soon. May be called from the handler of a signal."""
        self._wishes.put("reload")

    def wait_version(self, version: int, timeout_s: float) -> bool:
        """Wait until a plan of at least this number runs; say whether that came to be within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._version >= version, timeout_s)

    # --- looking on -----------------------------------------------------------------------------------------------

    def figures(self) -> PlanFigures:
        """See PlanView."""
        with self._changed:
            return PlanFigures(self._version, self._version - 1, self._share, self._tracker.rates)

    def status(self) -> Mapping[str, Any]:
        """See PlanView."""
        with self._changed:
            served, breaks = self._served, self._breaks
        return plan_status(served.plan, served.lanes, self.figures(), self._server.accounts.by_tenant, breaks)

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
                if self._section.period_s and windows % WINDOWS_A_PERIOD == 0:
                    self._look()
            except CotenantError as error:
                _log.error("the plan stays as it is: %s", error)
            except Exception:
                _log.exception("following the load failed; the plan stays as it is")

    def _count(self, window_ns: int) -> None:
        with self._counting:
            rows, self._rows = self._rows, {}
        with self._changed:
            self._tracker = self._tracker.after(rows, max(1, window_ns))

    def _reload(self) -> None:
        served = open_plan(self._path, self._section.device, self._place, self._served.lanes, self._server.root)
        self._aim = {}
        self._reorganise(served, Fitted(None, 1.0), f"{self._path} was read again")

    def _look(self) -> None:
        """Compare rates and plan; plan anew where they differ too much."""
        asked = self._asked()
        served = dict(self._aim)  # no plan serves more of what did not fit than the last one
        slots: dict[str, float] = {}
        for partition in self._served.plan.partitions:
            for slot in partition.slots:
                slots[slot.tenant] = slots.get(slot.tenant, 0.0) + slot.rate_per_s
        served.update({tenant: max(rate, served.get(tenant, 0.0)) for tenant, rate in slots.items()})
        found, self._calm = look(asked, served, self._settings, self._calm)
        if found is Look.KEEP:
            return
        loads = [replace(load, rate_per_s=asked[load.tenant]) for load in self._served.loads if load.tenant in asked]
        if not loads:
            return
        self._aim = {load.tenant: load.rate_per_s * (1 + self._settings.headroom) for load in loads}
        grounds = self._costs(self._server.root, (self._served.device,))
        planner = self._planners(self._section.planner, self._section.headroom)
        fitted = largest_fit(planner, loads, grounds.devices, grounds.costs, Plan((self._served.plan,)))
        if fitted.plan is None:
            why = fitted.breaks.detail if fitted.breaks else ""
            raise PlanError(f"no share of the rates that come fits this machine: {why}")
        plan = fitted.plan.devices[0]
        lanes = self._place.lanes_of(plan, self._served.lanes)
        rates = ", ".join(f"{load.tenant} {load.rate_per_s:.3g}/s" for load in loads)
        self._reorganise(replace(self._served, plan=plan, lanes=lanes), fitted, f"{found.value}: {rates}")

    def _asked(self) -> dict[str, float]:
        """Rates to plan for, of the tenants that are served here."""
        known = {tenant.name for tenant in self._server.driver.read(lambda engine: engine.tenants)}
        seen = self._tracker.asked()
        return {
            load.tenant: max(seen.get(load.tenant, 0.0), load.rate_per_s * _LEAST_SHARE)
            for load in self._served.loads
            if load.tenant in known
        }

    def _reorganise(self, served: ServedPlan, fitted: Fitted, why: str) -> None:
        breaks = fitted.breaks.detail if fitted.breaks and fitted.share < 1 else ""
        if breaks and fitted.breaks:
            _log.warning(
                "the rates that come do not fit: %.0f %% of each is planned for, tenant %r breaks first (%s): %s",
                *(100 * fitted.share, fitted.breaks.tenant, fitted.breaks.constraint, breaks),
            )
        if self._stopping.is_set():
            return
        is_new = served.plan != self._served.plan
        if is_new:
            began = self._server.clock.now_ns()
            settings = self._server.settings.policy
            self._server.change_policy(make_policy(settings, served.lanes.lanes, rounds=served.lanes.rounds))
            took_s = (self._server.clock.now_ns() - began) / 1e9
            _log.info("plan %d runs after %.2f s (%s)", self._version + 1, took_s, why)
        self._server.divide(served.shares_ns)
        with self._changed:
            self._served, self._share, self._breaks = served, fitted.share, breaks
            self._calm = 0
            self._version += is_new
            self._changed.notify_all()
