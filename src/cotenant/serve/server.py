"""The server behind the front-ends: models of a repository, their tenants, and the driver that serves them."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from cotenant.config import ServerConfig
from cotenant.core.actions import Action
from cotenant.core.admission import OPEN, Gate
from cotenant.core.engine import Engine
from cotenant.core.events import (
    DrainStarted,
    Event,
    PolicyChanged,
    PredictorChanged,
    QueryCancelled,
    TenantAdded,
    TenantChanged,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
)
from cotenant.core.snapshot import Policy
from cotenant.errors import CotenantError
from cotenant.execute.layout import device_cores
from cotenant.execute.protocol import Readers, Timing, WorkerStarter
from cotenant.execute.registry import layout_of, open_executor
from cotenant.measure.load_spec import VersionFacts
from cotenant.policies.registry import make_policy
from cotenant.predict.online import OnlineModel
from cotenant.repository import UnknownModelError, application_names, is_application, load_order, model_names
from cotenant.repository.sources import bare_words
from cotenant.serve.directory import Directory, refusal_of
from cotenant.serve.engine.clock import Clock, RealClock
from cotenant.serve.engine.counters import Counters
from cotenant.serve.engine.driver import Asked, Driver, Observer
from cotenant.serve.engine.flows import Flows
from cotenant.serve.engine.gates import Gates
from cotenant.serve.engine.merge_check import MergeCheck
from cotenant.serve.engine.queries import (
    Done,
    answer,
    figures_of,
    query_of,
    statistics_of,
    tell_refused,
    waiting_of,
)
from cotenant.serve.engine.reorganise import change
from cotenant.serve.engine.replies import Replies
from cotenant.serve.engine.slo_watch import log_served, log_turns
from cotenant.serve.metrics_page import MetricsPage
from cotenant.serve.models.name_table import NameEntry, NameTable
from cotenant.serve.models.served_application import ServedApplication
from cotenant.serve.models.served_models import ServedModel
from cotenant.serve.models.stored_loads import StoredLoads
from cotenant.serve.models.versions import ModelOpener, OpenedVersions, refused
from cotenant.serve.services import PlanView, services_of
from cotenant.trace.lost import LossAccount
from cotenant.wire.api import IndexEntry, InferRequest, InferResult, ModelMetadata, ModelStatistics, ServeError, Status
from cotenant.work import PlanLanes

_log = logging.getLogger("cotenant.server")
_WORKERS_END_S = 1.0
"""Time that idle workers have to end when the server stops; the others are killed."""
_ANSWERS_END_S = 0.5
"""Time for the queries of killed workers to be answered."""


class Server:
    """Serves a model repository. Implements `Backend`; front-ends are attached by the caller.

    Constructing it does no I/O; `start` loads the models. A model that cannot be loaded stays in the index with the
    reason, and the others are served. `plan` gives the lanes and their rounds in place of the settings. `readers`: see
    ModelExecutor.
    """

    def __init__(
        self,
        root: Path,
        settings: ServerConfig,
        *,
        clock: Clock | None = None,
        plan: PlanLanes | None = None,
        readers: Readers | None = None,
    ) -> None:
        self.root = root.resolve()
        self.settings = settings
        cores = device_cores(settings.device)
        layout = layout_of(settings.device)
        self.lanes = layout.lanes(settings.device, cores, "[device]") if plan is None else plan.lanes
        self.machine = layout.machine(self.lanes, cores)
        asked, rounds = settings.policy, () if plan is None else plan.rounds
        self.policy = make_policy(asked.name, asked.options, self.lanes, {"rounds": rounds})
        self.clock = clock or RealClock()
        self.counters = Counters(partial(log_turns, self.clock))
        self.beliefs = OnlineModel.under(self.policy)
        self.losses = LossAccount(self.beliefs.predictor, self.lanes)
        self.counters.leading_cause = self.losses.leading
        self._replies = Replies(self.counters, self.beliefs)
        self._executor = open_executor(settings.device, self.policy.spec.shares, settings.server.max_answer_bytes)
        self._executor.readers = readers
        self.names = NameTable(self.root, self.ready, self._executor)
        self._loading = threading.Condition(threading.Lock())
        self._busy: set[str] = set()
        """Names to which something happens, though the lock of loading may be free while it does."""
        self._is_ready = False
        self._adding = threading.Lock()  # held while a model is put in service, which a server that stops never does
        self._is_stopping = False
        self.following: PlanView | None = None
        """The plan that runs, if there is one."""
        looks = lambda: waiting_of(self._driver), self._executor, self._plan_metrics
        self._checks = MergeCheck(settings.integrity.sample, lambda: self.driver, self.counters.leave_out)
        more = self.losses.lost, self._checks.results, lambda: figures_of(self._driver)
        self._page = MetricsPage(self.counters.by_tenant, *looks, *more)
        self._driver: Driver | None = None
        self.gates: Mapping[str, Gate] = {}
        """The gates of tenants that take no query now."""
        self.on_gates: Callable[[], None] = lambda: None
        """Called when these have changed, between two events."""
        steers = lambda: self.driver, self.clock, self.counters, self.beliefs
        self._flows = Flows(*steers, self.names.next_stage, self._checks.watched)
        self.services = services_of(self)
        checks = self._cuts_of, self.names.check_tenants
        self.opener = ModelOpener(self.root, settings, self._executor, *checks, self._aside)

    def outlive(self, workers: WorkerStarter, loads: StoredLoads) -> None:
        """Let worker processes, and results of loads, stay for the next process when this one dies. Before `start`."""
        self._executor.starter, self.opener.stored = workers, loads

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self, *extra: Observer) -> None:
        """Load the models and accept queries. `extra` observers are told every event, before any tenant is there."""
        engine = Engine((), self.policy, self.beliefs.predictor, self.machine)
        shut = Gates(engine, lambda: self.on_gates())
        self.gates = shut.shut
        own: tuple[Observer, ...] = (self.losses, self.counters, self.beliefs, self._checks, self._worker_states)
        self._driver = Driver(engine, self._executor, self.clock, (*own, shut, *extra))
        self._executor.on_event = self._driver.post
        names = model_names(self.root)
        if bare := bare_words(self.root):
            _log.warning("%s: %s", self.root, bare)
        if not names:
            text = "add MODEL/config.toml and MODEL/1/model.onnx (or model.pt2), then load MODEL through the API"
            _log.warning("%s holds no models yet: %s", self.root.name, text)
        for service in self.services:
            service.start()
        with ThreadPoolExecutor(self.opener.loader.most, "cotenant-start") as pool:
            first, rest = load_order(self.root, names)
            list(pool.map(self._load_first, first))
        for name in (*rest, *application_names(self.root)):
            self._load_first(name)
        if self._is_stopping:
            return
        self.settle()
        gc.collect()
        gc.freeze()  # what is loaded now lives as long as the process: keep it out of every later collection
        with self._adding:
            if self._is_stopping:
                return
            for service in self.services:
                service.ready()
            self._is_ready = True
        self.names.on_change()
        index = self.index(ready_only=False)
        ready = {entry.name for entry in index if entry.state == "READY"}
        _log.info("ready: %d of %d models", len(ready), len({entry.name for entry in index}))

    def _load_first(self, name: str) -> None:
        """Load a model or an application at the start."""
        if not self._is_stopping:
            with suppress(ServeError):  # logged, and shown in the index
                self.load(name)

    def cancel_loads(self) -> None:
        """Load nothing more, and end what is being loaded: the server is about to stop. Never blocks for long."""
        self._is_stopping = True
        self.opener.loader.cancel()
        self._executor.cancel_loads()

    def stop(self, until_s: float | None = None) -> bool:
        """Refuse new queries, serve those inside until `until_s`, fail the rest, and stop, within a second or so.

        `until_s` is in seconds of the monotonic clock, by default `drain_s` from now. Says whether all launches ended.
        """
        drain_s = self.settings.server.drain_s
        until_s = time.monotonic() + drain_s if until_s is None else until_s
        self.cancel_loads()
        with self._adding:
            self._is_ready = False
        self.names.on_change()
        self.opener.loader.close()
        for service in self.services:
            service.close(until_s)
        if self._driver is not None:
            self._flows.refuse()
            self._driver.post(DrainStarted())
            self._flows.wait_idle(until_s - time.monotonic())  # between two stages nothing of a query is in the core
            is_idle = self._driver.wait_idle(until_s - time.monotonic())
            if not is_idle:
                _log.warning("not all queries ended within drain_s = %g: the rest fail", drain_s)
            for name in self.names.models:
                self._end_model(self.names.take(name, "the server stopped"), "the server stopped")
            now_s = time.monotonic()  # where all queries have ended, workers end within moments, or hang
            self._executor.close(min(until_s, now_s + _WORKERS_END_S) if is_idle else until_s)
        else:
            self._executor.close(until_s)
        have_ended = self._driver is None or self._driver.wait_idle(_ANSWERS_END_S)
        self.clock.close()
        return have_ended

    @property
    def driver(self) -> Driver:
        """The driver; only after `start`, else raises ServeError."""
        if self._driver is None:
            raise ServeError(Status.UNAVAILABLE, "the server is starting: it takes no requests for models yet")
        return self._driver

    # --- Backend --------------------------------------------------------------------------------------------------

    def live(self) -> bool:
        """See Backend."""
        return True

    def ready(self) -> bool:
        """See Backend."""
        return self._is_ready

    def model_ready(self, model: str, version: str) -> bool:
        """See Backend."""
        try:
            served = self.names.find(model, version)
        except ServeError as error:
            if error.status is Status.UNAVAILABLE:
                return False
            raise
        return not self.names.problem_of(served)

    def metadata(self, model: str, version: str) -> ModelMetadata:
        """See Backend."""
        return self.names.find(model, version).metadata

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        """See Backend."""
        return self.names.find(model, version).config()

    def statistics(self, model: str, version: str) -> Sequence[ModelStatistics]:
        """See Backend."""
        return [self._counted(each) for each in ([self.names.find(model, version)] if model else self.names.fronts())]

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """See Backend."""
        return self.names.index(ready_only=ready_only)

    def load(self, model: str) -> None:
        """See Backend. What serves the name is replaced on success alone.

        Raises ServeError (NOT_FOUND, INVALID_ARGUMENT, UNAVAILABLE) with what is wrong and how to mend it.
        """
        driver = self.driver
        with self._alone(model):
            try:
                refusal = self._load(model, driver)
            except UnknownModelError as error:
                raise ServeError(Status.NOT_FOUND, str(error)) from None
            except (CotenantError, OSError) as error:
                found = refused(self.root, model, error)
                _log.error("model %r is not loaded: %s", model, found)
                raise ServeError(found.status, self.names.refuse(model, found)) from None
        if self._is_ready:
            self.settle()
        if refusal is not None:
            raise refusal

    def unload(self, model: str) -> None:
        """See Backend."""
        with self._alone(model):
            if not self.names.get(model).is_declared:
                raise ServeError(Status.NOT_FOUND, f"model {model!r} is not loaded")
            entry = self.names.take(model, "it was unloaded")
            self._end_model(entry, "the model was unloaded")
            self._end_application(entry, "the application was unloaded")
            self.names.follow()

    def refusal(self, model: str, version: str) -> ServeError | None:
        """See Backend."""
        found = self.names.get(model).versions.get(version)
        if found is not None and (gate := self.gates.get(found.tenant.name, OPEN)) is OPEN:
            return None
        try:
            served = self.names.find(model, version)
            self.names.check_workers(served)
        except ServeError as error:
            return error
        return None if found is None else refusal_of(found.tenant.name, gate, self.clock.now_ns())

    def refused(self, model: str, arrival_ns: int, error: ServeError) -> None:
        """See Backend."""
        tell_refused(self._driver, self.clock, arrival_ns, self.names.get(model).tenant, error)

    def submit(self, request: InferRequest, done: Done) -> int:
        """See Backend."""
        try:
            asked = self._asked(request, done)
            return asked if isinstance(asked, int) else self.driver.submit(*asked)
        except ServeError as error:
            self.refused(request.model, request.arrival_ns, error)
            raise

    def submit_together(self, requests: Sequence[tuple[InferRequest, Done]]) -> list[int | ServeError]:
        """Take queries that came at once, as `submit` of each, and decide on all of them at once.

        Gives the number of each, or the error that `submit` would have raised.
        """
        asked: list[int | Asked | ServeError] = []
        for request, done in requests:
            try:
                asked.append(self._asked(request, done))
            except ServeError as error:
                asked.append(error.with_traceback(None))  # which would hold this frame, and it the error and all inputs
            except Exception:  # of one request: the others that came with it go on
                _log.exception("a query of model %r could not be submitted", request.model)
                asked.append(ServeError(Status.INTERNAL, "internal error; the server's log has the details"))
        made = iter(self.driver.submit_together([each for each in asked if isinstance(each, tuple)]))
        found = [next(made) if isinstance(each, tuple) else each for each in asked]
        for (request, _), each in zip(requests, found, strict=True):
            if isinstance(each, ServeError):
                self.refused(request.model, request.arrival_ns, each)
        return found

    def _asked(self, request: InferRequest, done: Done) -> int | Asked:
        """What a request asks of the driver, or the number of the query of an application, which has begun."""
        served = self.names.find(request.model, request.version)
        self.names.check_workers(served)
        if isinstance(served, ServedApplication):
            return self._flows.submit(served, request, done)
        form, inputs = served.form(request), request.inputs
        told = self._checks.watched(served, form, inputs, partial(answer, done, served, self.clock))
        return partial(query_of, served, form, request, self.counters), inputs, told

    def cancel(self, query: int) -> None:
        """See Backend."""
        if not self._flows.cancel(query):
            self.driver.post(QueryCancelled(query))

    def replied(self, result: InferResult) -> None:
        """See Backend."""
        self.replied_at(result.query, result.ended_ns, self.clock.now_ns())

    def replied_at(self, query: int, ended_ns: int, at_ns: int) -> None:
        """An answer was handed to its connection. Times are of the server's clock; `ended_ns` is 0 where it is not
        known when the query had ended."""
        if (late := self._replies.written(query, ended_ns, at_ns, learns=self.policy.spec.tail_aware)) is not None:
            self.driver.post(late)

    def directory(self) -> Directory:
        """What front-ends in processes of their own know of all names."""
        return self.names.directory()

    def metrics(self) -> bytes:
        """See Backend."""
        return self._page.render()

    def plan(self) -> Mapping[str, Any]:
        """See Backend."""
        if self.following is None:
            raise ServeError(Status.NOT_FOUND, "this server runs no plan: start it with 'cotenant serve --plan FILE'")
        return self.following.status()

    def change_policy(self, policy: Policy) -> None:
        """Let another policy decide, make before break: see `reorganise.change`. Raises ConfigError or ModelError."""
        with self._loading:
            for service in self.services:
                service.changing(policy)
            change(self.driver, self._executor, self.beliefs, self.served_models(), self.policy, policy)
            self.policy, self.lanes = policy, policy.spec.lanes
        self.settle()

    def divide(self, shares_ns: Mapping[str, Mapping[str, int]]) -> None:
        """Take the deadlines of stages from how a plan divides the SLOs: nanoseconds by application and stage."""
        with self._loading:
            self.names.divide(shares_ns)

    # --- models ---------------------------------------------------------------------------------------------------

    def _load(self, model: str, driver: Driver) -> ServeError | None:
        """Load what the repository has under a name, and let it serve the name. Gives what the client is told where
        that is only a part of it."""
        entry = self.names.get(model)
        if is_application(self.root, model):
            return self._load_application(model, entry)
        with driver.opening(model):
            opened = self._open(model, entry)
        if not opened.served:
            assert opened.refusal is not None
            self.names.note(model, opened.unserved)
            raise opened.refusal
        with self._adding:
            if self._is_stopping:
                self.opener.close_all(opened.served)
                raise ServeError(Status.UNAVAILABLE, f"model {model!r} is not loaded: the server is stopping")
            heirs = _heirs(entry, opened)
            if heirs:
                left = {id(each) for each, _ in heirs}
                versions = {name: each for name, each in entry.versions.items() if id(each) not in left}
                self._end_model(replace(entry, versions=versions), "the model was reloaded")
            elif entry.is_declared:
                self.names.take(model, "it is being reloaded")
                self._end_model(entry, "the model was reloaded")
                self._end_application(entry, "a model was loaded under its name")
            self._add(model, opened, heirs)
        if heirs:  # their last launches end with them
            begun = driver.read(lambda engine: engine.launches)
            driver.wait_ended(begun, self.settings.server.drain_s)
            for old, _ in heirs:
                old.loaded.close()
        self.names.follow()
        return opened.refusal

    def _open(self, model: str, entry: NameEntry) -> OpenedVersions:
        """Open a model, anew where the lanes have changed meanwhile. Raises what `ModelOpener.open` and `check` do."""
        while True:
            before = self.policy.spec
            opened = self.opener.open(model, self.policy, self.names.owners(), entry)
            now = self.policy.spec
            if (now.shares, now.preempt) == (before.shares, before.preempt):
                break
            self.opener.close_all(opened.served)
        try:
            if opened.served:
                self.opener.check([each.opened.found for each in opened.served.values()], self.names.owners())
        except CotenantError:
            self.opener.close_all(opened.served)
            raise
        return opened

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Take the lock of loading, once nothing else happens to a name. Nothing else does until the end."""
        with self._loading:
            while name in self._busy:
                self._loading.wait()
            self._busy.add(name)
            try:
                yield
            finally:
                self._busy.remove(name)
                self._loading.notify_all()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Leave the lock of loading to others for a while."""
        self._loading.release()
        try:
            yield
        finally:
            self._loading.acquire()

    def _load_application(self, name: str, entry: NameEntry) -> ServeError | None:
        """Load an application; queries under way go on as they began.

        One with models that are not served is remembered, unless something serves its name, and served once they are.
        """
        spec = self.names.read_application(name)
        try:
            made = self.names.fit(spec)
        except CotenantError as error:
            _log.warning("application %r is not served: %s", name, error)
            if not entry.is_served:
                self.counters.add(name, spec.slo_ns)
            return ServeError(Status.UNAVAILABLE, self.names.refuse(name, error, spec))
        if entry.versions:
            self._end_model(self.names.take(name, "it is being reloaded"), "an application was loaded under its name")
        self.counters.add(name, spec.slo_ns)
        self.names.put_application(spec, made)
        self.names.follow()
        return None

    def settle(self) -> None:
        """Let services follow the models and lanes that there are now. Services call it when they have more to add."""
        with self._loading:
            policy = self.policy
            for service in self.services:
                policy = service.followed(policy)
            if policy is not self.policy:
                self.policy = policy
                self.driver.post(PolicyChanged(policy))
            for service in self.services:
                service.settled()

    def served_models(self) -> list[ServedModel]:
        """The versions of all models that are served, each once."""
        models = self.names.models.values()
        return list({id(each): each for versions in models for each in versions.values()}.values())

    def _cuts_of(self, opened: VersionFacts, cuts: tuple[int, ...]) -> tuple[int, ...]:
        for service in self.services:
            cuts = service.cuts(opened, self.policy, cuts)
        return cuts

    def _add(self, model: str, opened: OpenedVersions, heirs: Sequence[tuple[ServedModel, ServedModel]]) -> None:
        """Put versions in service. Of `heirs`, each a served one and its successor, no query is lost."""
        versions = opened.served
        new = list({id(served): served for served in versions.values()}.values())
        self.driver.follow(partial(self._open_books, new, heirs))
        self.names.put_model(model, versions, opened.unserved)
        for served in new:
            self._executor.announce(served.tenant.name)
        tenant = versions[""].tenant
        log_served(model, tenant, self.beliefs.alone_ns(tenant.name))

    def _open_books(
        self, new: Sequence[ServedModel], heirs: Sequence[tuple[ServedModel, ServedModel]], engine: Engine
    ) -> list[Event]:
        """Start to count and to predict for tenants; between two events, since observers write there too."""
        for old, served in heirs:
            old.ending, old.successor, old.is_over = engine.ending(old.tenant.name), served, True
        for served in new:
            name = served.tenant.name
            self._executor.add_model(name, served.loaded)
            self.counters.add(name, served.tenant.slo_ns)
            self.beliefs.add(name, served.profile.table(self.settings.predict.quantile))
            for service in self.services:
                service.added(served)
        changed = {served.tenant.name for _, served in heirs}
        added = [TenantAdded(served.tenant) for served in new if served.tenant.name not in changed]
        return [
            *[TenantChanged(served.tenant) for _, served in heirs],
            PredictorChanged(self.beliefs.predictor),
            *[TenantResumed(name) for name in changed],
            *added,
        ]

    def _end_model(self, entry: NameEntry, reason: str) -> None:
        """The versions of a model, if the name had one, are served no more."""
        for served in {id(served): served for served in entry.versions.values()}.values():
            served.is_over = True
            self.driver.post(TenantRemoved(served.tenant.name, reason))
            self._executor.remove_model(served.tenant.name)
            served.loaded.close()

    def _end_application(self, entry: NameEntry, reason: str) -> None:
        """The queries of an application, if the name had one, fail."""
        if entry.spec is not None:
            self._flows.fail(entry.spec.name, reason)
            self.counters.remove(entry.spec.name)

    # --- looking on --------------------------------------------------------------------------------------------------

    def _worker_states(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> None:
        """See Observer: whether names are ready depends on their workers."""
        if isinstance(event, (TenantSuspended, TenantResumed)):
            self.names.on_change()

    def _plan_metrics(self) -> Iterator[Metric]:
        if self.following is not None:
            yield from self.following.metrics()

    def _counted(self, served: ServedModel | ServedApplication) -> ModelStatistics:
        return statistics_of(served.metadata.name, served.version, self.counters.by_tenant.get(served.counted_as))


def _heirs(entry: NameEntry, opened: OpenedVersions) -> list[tuple[ServedModel, ServedModel]]:
    """Served versions of a name, each with the one that is to serve its tenant and takes its queries."""
    new = {each.tenant.name: each for each in opened.served.values()}
    served = {id(each): each for each in entry.versions.values()}.values()
    pairs = [(each, new[each.tenant.name]) for each in served if each.tenant.name in new]
    return [(old, heir) for old, heir in pairs if heir.takes_queries_of(old)]
