"""Integrity check of merged answers: a sample of queries is run alone again, off the critical path, and compared."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cotenant.core.actions import Action, Launch, Respond
from cotenant.core.events import Event, LaunchEnded, TenantChanged, TenantRemoved
from cotenant.execute.protocol import Tensors, Timing
from cotenant.measure.merging_trial import is_same_answer
from cotenant.serve.engine.driver import Done, Driver
from cotenant.serve.models.served_models import QueryForm, ServedModel
from cotenant.shortages import Resource, report
from cotenant.types import ANSWERS, Query
from cotenant.wire.api import ServeError

_CHECKS, _DIFFERENCES = 3, 2
"""Merging ends for a model after _DIFFERENCES differences in its last _CHECKS checks."""
_RANK = 1 << 17
"""Rank of checks: after every priority of a request."""
_PATIENCE_NS = 3_600_000_000_000
_FIRST_KEY = 1 << 40
Watch = Callable[[ServedModel, QueryForm, Tensors, Done], Done]
"""Type of `MergeCheck.watched`."""
_log = logging.getLogger("cotenant.merging")


@dataclass(slots=True)
class _Tenant:
    merged: int = 0
    is_checking: bool = False
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_CHECKS))


class MergeCheck:
    """Observer that runs the query of every `sample`-th merged answer of a tenant alone again.

    The check is a query of the same tenant with the lowest priority that merges with no other query. At most one runs
    at a time. `left_out` excludes its number from the counters of clients. Two differences in three checks end merging
    for the model (`ServedModel.end_merging`) until the process ends. `sample` 0 disables checks.
    """

    def __init__(self, sample: int, driver: Callable[[], Driver], left_out: Callable[[int], None]) -> None:
        self.results: dict[str, Counter[str]] = {}
        """Checks by tenant and result: "same" or "different"."""
        self._sample = sample
        self._driver = driver
        self._left_out = left_out
        self._tenants: dict[str, _Tenant] = {}
        self._running: dict[int, Launch] = {}
        self._picked: dict[int, str] = {}
        """Tenants by query number, for queries selected for a check."""
        self._keys = itertools.count(_FIRST_KEY)
        self._compares = ThreadPoolExecutor(1, "cotenant-merge-check")
        self._lock = threading.Lock()

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """Observe an event, as `driver.Observer`."""
        if type(event) is LaunchEnded:
            launch = self._running.pop(event.launch, None)
            if launch is not None and event.error is None:
                self._ended(launch, actions)
        elif type(event) is TenantRemoved:
            self._tenants.pop(event.tenant, None)
        elif type(event) is TenantChanged:
            self._tenants.pop(event.tenant.name, None)
        if self._sample:
            for action in actions:
                if type(action) is Launch and action.last and len(action.queries) > 1:
                    self._running[action.id] = action
        return None

    def _ended(self, launch: Launch, actions: list[Action]) -> None:
        name = launch.work.tenant
        tenant = self._tenants.setdefault(name, _Tenant())
        answered = [each.query for each in actions if type(each) is Respond and each.outcome in ANSWERS]
        before, tenant.merged = tenant.merged, tenant.merged + len(answered)
        if tenant.merged // self._sample > before // self._sample and not tenant.is_checking:
            tenant.is_checking = True
            self._picked[answered[self._sample - 1 - before % self._sample]] = name

    def watched(self, served: ServedModel, form: QueryForm, inputs: Tensors, done: Done) -> Done:
        """Wrap `done` so that a check follows it if the query is selected."""
        if not self._sample or not served.merges:
            return done

        def delivered(respond: Respond, outputs: Tensors | None) -> None:
            done(respond, outputs)
            if respond.query in self._picked:
                name = self._picked.pop(respond.query)
                if outputs is not None:
                    self._run_alone(name, served, form, inputs, outputs)

        return delivered

    def _run_alone(self, name: str, served: ServedModel, form: QueryForm, inputs: Tensors, merged: Tensors) -> None:
        def make(number: int, now_ns: int) -> Query:
            tenant = served.still_served()
            self._left_out(number)
            deadline_ns = now_ns + max(_PATIENCE_NS, tenant.slo_ns)
            return Query(number, name, now_ns, deadline_ns, _RANK, form.items, form.shape, -next(self._keys))

        def ended(respond: Respond, alone: Tensors | None) -> None:
            if alone is None:
                self._end(name)
            else:
                try:
                    self._compares.submit(self._compare, name, served, alone, merged)
                except RuntimeError:  # the system refuses a thread
                    report(Resource.THREAD, f"a merged answer of tenant {name!r} is not compared")
                    self._end(name)

        try:
            self._driver().submit(make, inputs, ended)
        except ServeError:  # the model is no longer served
            self._end(name)

    def _end(self, name: str) -> None:
        with self._lock:
            if (tenant := self._tenants.get(name)) is not None:
                tenant.is_checking = False

    def _compare(self, name: str, served: ServedModel, alone: Tensors, merged: Tensors) -> None:
        is_same = is_same_answer(alone, merged, is_exact=served.batching == "exact")
        with self._lock:
            self.results.setdefault(name, Counter())["same" if is_same else "different"] += 1
            tenant = self._tenants.setdefault(name, _Tenant())
            tenant.is_checking = False
            tenant.recent.append(is_same)
            differences = tenant.recent.count(False)
        if is_same:
            return
        if differences < _DIFFERENCES or not served.merges:
            text = "model %r: the answer of a merged query differs from that of the same query run alone"
            _log.warning(text, served.metadata.name)
            return
        served.end_merging(f"{differences} of the last {len(tenant.recent)} checked answers differ from solo runs")
