"""Server behind the front-ends: the models of a repository, their tenants, and the driver of the engine."""

from __future__ import annotations

import gc
import logging
import os
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
from typing_extensions import override

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
from cotenant.repository.paths import learnt_factors_path
from cotenant.repository.sources import bare_words
from cotenant.serve.directory import Directory, refusal_of
from cotenant.serve.engine.clock import Clock, RealClock
from cotenant.serve.engine.counters import Counters
from cotenant.serve.engine.driver import Driver, Observer, Submission
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
from cotenant.serve.engine.slo_watch import log_served, log_slo_change
from cotenant.serve.metrics_page import MetricsPage
from cotenant.serve.models.learnt_factors import LearntFactors
from cotenant.serve.models.model_loader import LoadedVersions, ModelLoader, refused
from cotenant.serve.models.name_table import NameEntry, NameTable
from cotenant.serve.models.served_application import ServedApplication
from cotenant.serve.models.served_models import ServedModel
from cotenant.serve.models.stored_loads import StoredLoads
from cotenant.serve.processor_time import ProcessorTime
from cotenant.serve.services import PlanView, services_of
from cotenant.trace.lost import LossAccount
from cotenant.wire.api import (
    Backend,
    IndexEntry,
    InferRequest,
    InferResult,
    ModelMetadata,
    ModelStatistics,
    ServeError,
    Status,
)
from cotenant.work import PlanLanes

_log = logging.getLogger("cotenant.server")
_WORKERS_END_S = 1.0
"""Seconds that idle workers have to exit when the server stops; then they are killed."""
_ANSWERS_END_S = 0.5
"""Seconds to answer the queries of killed workers."""


class Server(Backend):
    """Server of a model repository. The caller attaches front-ends.

    The constructor does no I/O; `start` loads the models. A model that cannot be loaded stays in the index with the
    reason; the others are served. `plan` replaces the lanes and rounds of the settings. `readers` watches descriptors
    for the executor.
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
        configured, rounds = settings.policy, () if plan is None else plan.rounds
        self.policy = make_policy(configured.name, configured.options, self.lanes, {"rounds": rounds})
        self.clock = clock or RealClock()
        self.counters = Counters(partial(log_slo_change, self.clock))
        self.beliefs = OnlineModel.under(self.policy)
        self._learnt = LearntFactors(learnt_factors_path(self.root), self.clock)
        self.losses = LossAccount(self.beliefs.predictor, self.lanes)
        self.counters.leading_cause, self.counters.on_predictor = self.losses.leading, self._learnt.note
        self._replies = Replies(self.counters, self.beliefs)
        self._executor = open_executor(settings.device, self.policy.spec.shares, settings.server.max_answer_bytes)
        self._executor.readers = readers
        self.names = NameTable(self.root, lambda: self._is_stopping, self._executor)
        self._loading = threading.Condition(threading.Lock())
        self._busy: set[str] = set()
        """Names that a load or unload holds; the load lock may be free meanwhile."""
        self._is_ready = False
        self._adding = threading.Lock()  # held while a model is put in service; a stopping server never does that
        self._is_stopping = False
        self.following: PlanView | None = None
        """The running plan; None without a plan."""
        looks = lambda: waiting_of(self._driver), self._executor, self._plan_metrics
        self._checks = MergeCheck(settings.integrity.sample, lambda: self.driver, self.counters.leave_out)
        more = self.losses.lost, self._checks.results, lambda: figures_of(self._driver)
        self.processor_time = ProcessorTime(os.getpid())
        self._page = MetricsPage(self.counters.by_tenant, *looks, *more, self.processor_time)
        self._driver: Driver | None = None
        self.gates: Mapping[str, Gate] = {}
        """Shut gates by tenant."""
        self.on_gates: Callable[[], None] = lambda: None
        """Called between two events when `gates` has changed."""
        steers = lambda: self.driver, self.clock, self.counters, self.beliefs
        self._flows = Flows(*steers, self.names.next_stage, self._checks.watched)
        self.services = services_of(self)
        checks = self._cuts_of, self.names.check_tenants
        self.model_loader = ModelLoader(self.root, settings, self._executor, *checks, self._unlocked)
        self.model_loader.loader_process.on_step = self.names.loading

    def outlive(self, workers: WorkerStarter, loads: StoredLoads) -> None:
        """Let worker processes, and results of loads, stay for the next process when this one dies. Before `start`."""
        self._executor.starter, self.model_loader.stored = workers, loads

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self, *extra: Observer) -> None:
        """Load the models and accept queries. `extra` observers get every event, from before the first tenant."""
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
            _log.warning("%s has no models yet: %s", self.root.name, text)
        for service in self.services:
            service.start()
        first, rest = load_order(self.root, names)
        rest += application_names(self.root)
        self.names.expect([*first, *rest])
        with ThreadPoolExecutor(self.model_loader.loader_process.most, "cotenant-start") as pool:
            list(pool.map(self._load_first, first))
        for name in rest:
            self._load_first(name)
        if self._is_stopping:
            return
        self.settle()
        gc.collect()
        gc.freeze()  # objects loaded so far live as long as the process: exclude them from collections
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
        """Load a model or an application at the start; errors are logged."""
        if not self._is_stopping:
            with suppress(ServeError):  # logged, and shown in the index
                self.load(name)

    def cancel_loads(self) -> None:
        """Cancel current and future loads, as the server is about to stop. Does not block for long."""
        self._is_stopping = True
        self.model_loader.loader_process.cancel()
        self._executor.cancel_loads()

    def stop(self, until_s: float | None = None) -> bool:
        """Stop: refuse new queries, serve live queries until `until_s`, then fail the rest within about a second.
        `until_s`: seconds of the monotonic clock, by default `drain_s` from now. Returns whether all launches ended."""
        drain_s = self.settings.server.drain_s
        until_s = time.monotonic() + drain_s if until_s is None else until_s
        self.cancel_loads()
        with self._adding:
            self._is_ready = False
        self.names.on_change()
        self.model_loader.loader_process.close()
        self._learnt.save()
        for service in self.services:
            service.close(until_s)
        if self._driver is not None:
            self._flows.refuse()
            self._driver.post(DrainStarted())
            self._flows.wait_idle(until_s - time.monotonic())  # a query between two stages is not in the core
            is_idle = self._driver.wait_idle(until_s - time.monotonic())
            if not is_idle:
                _log.warning("not all queries ended within server.drain_s = %g s: the rest fail", drain_s)
            for name in self.names.models:
                self._end_model(self.names.take(name, "the server stopped"), "the server stopped")
            now_s = time.monotonic()  # if all queries have ended, a worker exits at once, or it hangs
            self._executor.close(min(until_s, now_s + _WORKERS_END_S) if is_idle else until_s)
        else:
            self._executor.close(until_s)
        have_ended = self._driver is None or self._driver.wait_idle(_ANSWERS_END_S)
        self.clock.close()
        return have_ended

    @property
    def driver(self) -> Driver:
        """Driver of the engine. Raises ServeError (UNAVAILABLE) before `start`."""
        if self._driver is None:
            raise ServeError(
                Status.UNAVAILABLE, "the server is starting and accepts no requests for models yet; try again later"
            )
        return self._driver

    # --- Backend --------------------------------------------------------------------------------------------------

    @override
    def live(self) -> bool:
        return True

    @override
    def ready(self) -> bool:
        return self._is_ready

    @override
    def model_ready(self, model: str, version: str) -> bool:
        try:
            served = self.names.find(model, version)
        except ServeError as error:
            if error.status is Status.UNAVAILABLE:
                return False
            raise
        return not self.names.problem_of(served)

    @override
    def metadata(self, model: str, version: str) -> ModelMetadata:
        return self.names.find(model, version).metadata

    @override
    def config(self, model: str, version: str) -> Mapping[str, Any]:
        return self.names.find(model, version).config()

    @override
    def statistics(self, model: str, version: str) -> Sequence[ModelStatistics]:
        return [self._counted(each) for each in ([self.names.find(model, version)] if model else self.names.fronts())]

    @override
    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        return self.names.index(ready_only=ready_only)

    def load(self, model: str) -> None:
        """Load or reload a model. A served version is replaced only if the load succeeds. Raises ServeError (NOT_FOUND,
        INVALID_ARGUMENT, UNAVAILABLE) with the reason and the remedy."""
        driver = self.driver
        with self._exclusive(model):
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

    @override
    def unload(self, model: str) -> None:
        with self._exclusive(model):
            if not self.names.get(model).is_declared:
                raise ServeError(Status.NOT_FOUND, f"model {model!r} is not loaded")
            entry = self.names.take(model, "it was unloaded")
            self._end_model(entry, "the model was unloaded")
            self._end_application(entry, "the application was unloaded")
            self.names.follow()

    @override
    def refusal(self, model: str, version: str) -> ServeError | None:
        found = self.names.get(model).versions.get(version)
        if found is not None and (gate := self.gates.get(found.tenant.name, OPEN)) is OPEN:
            return None
        try:
            served = self.names.find(model, version)
            self.names.check_workers(served)
        except ServeError as error:
            return error
        return None if found is None else refusal_of(found.tenant.name, gate, self.clock.now_ns())

    @override
    def refused(self, model: str, arrival_ns: int, error: ServeError) -> None:
        tell_refused(self._driver, self.clock, arrival_ns, self.names.get(model).tenant, error)

    @override
    def submit(self, request: InferRequest, done: Done) -> int:
        try:
            submission = self._submission(request, done)
            return submission if isinstance(submission, int) else self.driver.submit(*submission)
        except ServeError as error:
            self.refused(request.model, request.arrival_ns, error)
            raise

    def submit_together(self, requests: Sequence[tuple[InferRequest, Done]]) -> list[int | ServeError]:
        """Submit queries that came together, with one scheduling decision for all of them. Returns the number of each,
        or the error that `submit` would have raised."""
        submissions: list[int | Submission | ServeError] = []
        for request, done in requests:
            try:
                submissions.append(self._submission(request, done))
            except ServeError as error:
                submissions.append(error.with_traceback(None))  # a traceback would keep all inputs alive
            except Exception:  # the other requests are not affected
                _log.exception("model %r: a query could not be submitted", request.model)
                submissions.append(ServeError(Status.INTERNAL, "internal error; the server's log has the details"))
        made = iter(self.driver.submit_together([each for each in submissions if isinstance(each, tuple)]))
        found = [next(made) if isinstance(each, tuple) else each for each in submissions]
        for (request, _), each in zip(requests, found, strict=True):
            if isinstance(each, ServeError):
                self.refused(request.model, request.arrival_ns, each)
        return found

    def _submission(self, request: InferRequest, done: Done) -> int | Submission:
        """Build the submission of a request; for an application, start its query and return the number."""
        served = self.names.find(request.model, request.version)
        self.names.check_workers(served)
        if isinstance(served, ServedApplication):
            return self._flows.submit(served, request, done)
        form, inputs = served.form(request), request.inputs
        watched = self._checks.watched(served, form, inputs, partial(answer, done, served, self.clock))
        return partial(query_of, served, form, request, self.counters), inputs, watched

    @override
    def cancel(self, query: int) -> None:
        if not self._flows.cancel(query):
            self.driver.post(QueryCancelled(query))

    @override
    def replied(self, result: InferResult) -> None:
        self.replied_at(result.query, result.ended_ns, self.clock.now_ns())

    def replied_at(self, query: int, ended_ns: int, at_ns: int) -> None:
        """Record that the answer of a query was passed to its connection at `at_ns` of the server's clock. `ended_ns`
        is the end of the query, 0 if unknown."""
        if (late := self._replies.written(query, ended_ns, at_ns, learns=self.policy.spec.tail_aware)) is not None:
            self.driver.post(late)

    def directory(self) -> Directory:
        """Directory of all names for front-ends in other processes."""
        return self.names.directory(is_open=self._is_ready)

    @override
    def metrics(self) -> bytes:
        return self._page.render()

    @override
    def plan(self) -> Mapping[str, Any]:
        if self.following is None:
            raise ServeError(Status.NOT_FOUND, "the server runs no plan; start it with 'cotenant serve --plan FILE'")
        return self.following.status()

    def change_policy(self, policy: Policy) -> None:
        """Replace the policy, make before break, as `reorganise.change`. Raises ConfigError or ModelError."""
        with self._loading:
            for service in self.services:
                service.changing(policy)
            change(self.driver, self._executor, self.beliefs, self.served_models(), self.policy, policy)
            self.policy, self.lanes = policy, policy.spec.lanes
        self.settle()

    def divide(self, shares_ns: Mapping[str, Mapping[str, int]]) -> None:
        """Set the stage budgets of applications from a plan: nanoseconds by application and stage."""
        with self._loading:
            self.names.divide(shares_ns)

    # --- models ---------------------------------------------------------------------------------------------------

    def _load(self, model: str, driver: Driver) -> ServeError | None:
        """Load the model or application of a name and put it in service. Returns the error for the client if the newest
        version of a model failed and an older one is served."""
        entry = self.names.get(model)
        if is_application(self.root, model):
            return self._load_application(model, entry)
        with driver.model_loading(model):
            loaded = self._load_versions(model, entry)
        if not loaded.served:
            assert loaded.refusal is not None
            self.names.note(model, loaded.unserved)
            raise loaded.refusal
        with self._adding:
            if self._is_stopping:
                self.model_loader.close_all(loaded.served)
                raise ServeError(Status.UNAVAILABLE, f"model {model!r} is not loaded: the server is stopping")
            successors = _successors(entry, loaded)
            if successors:
                left = {id(each) for each, _ in successors}
                versions = {name: each for name, each in entry.versions.items() if id(each) not in left}
                self._end_model(replace(entry, versions=versions), "the model was reloaded")
            elif entry.is_declared:
                self.names.take(model, "it is being reloaded")
                self._end_model(entry, "the model was reloaded")
                self._end_application(entry, "a model was loaded under its name")
            self._add(model, loaded, successors)
        if successors:  # wait for the last launches of the replaced versions
            begun = driver.read(lambda engine: engine.launches)
            driver.wait_ended(begun, self.settings.server.drain_s)
            for old, _ in successors:
                old.loaded.close()
        self.names.follow()
        return loaded.refusal

    def _load_versions(self, model: str, entry: NameEntry) -> LoadedVersions:
        """Load a model, again if the lanes changed meanwhile. Raises as `ModelLoader.load` and `check` do."""
        while True:
            before = self.policy.spec
            loaded = self.model_loader.load(model, self.policy, self.names.owners(), entry)
            now = self.policy.spec
            if (now.shares, now.preempt) == (before.shares, before.preempt):
                break
            self.model_loader.close_all(loaded.served)
        try:
            if loaded.served:
                self.model_loader.check([each.facts.found for each in loaded.served.values()], self.names.owners())
        except CotenantError:
            self.model_loader.close_all(loaded.served)
            raise
        return loaded

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """Hold the load lock and exclusive access to a name, which lasts even while the lock is released."""
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
    def _unlocked(self) -> Iterator[None]:
        """Release the load lock for the duration of a block."""
        self._loading.release()
        try:
            yield
        finally:
            self._loading.acquire()

    def _load_application(self, name: str, entry: NameEntry) -> ServeError | None:
        """Load an application; its running queries continue unchanged.

        If one of its models is not served, the application is registered and served as soon as all models are. A
        served model or application of the same name stays in service then.
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
        """Let services adapt to the current models and lanes. A service calls it when it has new data."""
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
        """Served versions of all models, each once."""
        models = self.names.models.values()
        return list({id(each): each for versions in models for each in versions.values()}.values())

    def _cuts_of(self, facts: VersionFacts, cuts: tuple[int, ...]) -> tuple[int, ...]:
        for service in self.services:
            cuts = service.cuts(facts, self.policy, cuts)
        return cuts

    def _add(self, model: str, loaded: LoadedVersions, successors: Sequence[tuple[ServedModel, ServedModel]]) -> None:
        """Put versions in service. `successors`: pairs of a version and its successor, which takes its queries."""
        versions = loaded.served
        new = list({id(served): served for served in versions.values()}.values())
        self.driver.post_from(partial(self._open_books, new, successors))
        self.names.put_model(model, versions, loaded.unserved)
        for served in new:
            self._executor.announce(served.tenant.name)
        tenant = versions[""].tenant
        log_served(model, tenant, self.beliefs.alone_ns(tenant.name))

    def _open_books(
        self, new: Sequence[ServedModel], successors: Sequence[tuple[ServedModel, ServedModel]], engine: Engine
    ) -> list[Event]:
        """Register new versions with executor, counters and predictors; called between two events."""
        for old, served in successors:
            old.ending, old.successor, old.is_over = engine.ending(old.tenant.name), served, True
        for served in new:
            name = served.tenant.name
            self._executor.add_model(name, served.loaded)
            self.counters.add(name, served.tenant.slo_ns)
            table = served.profile.table(self.settings.predict.quantile)
            self.beliefs.add(name, table, self._learnt.of(name, table))
            for service in self.services:
                service.added(served)
        changed = {served.tenant.name for _, served in successors}
        added = [TenantAdded(served.tenant) for served in new if served.tenant.name not in changed]
        return [
            *[TenantChanged(served.tenant) for _, served in successors],
            PredictorChanged(self.beliefs.predictor),
            *[TenantResumed(name) for name in changed],
            *added,
        ]

    def _end_model(self, entry: NameEntry, reason: str) -> None:
        """Take the versions of a model out of service; its queries fail with the reason."""
        for served in {id(served): served for served in entry.versions.values()}.values():
            served.is_over = True
            self.driver.post(TenantRemoved(served.tenant.name, reason))
            self._executor.remove_model(served.tenant.name)
            served.loaded.close()

    def _end_application(self, entry: NameEntry, reason: str) -> None:
        """Take an application out of service, if the name had one; its queries fail with the reason."""
        if entry.spec is not None:
            self._flows.fail(entry.spec.name, reason)
            self.counters.remove(entry.spec.name)

    # --- observers ---------------------------------------------------------------------------------------------------

    def _worker_states(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> None:
        """Observe worker events: the readiness of names depends on their workers."""
        if isinstance(event, (TenantSuspended, TenantResumed)):
            self.names.on_change()

    def _plan_metrics(self) -> Iterator[Metric]:
        if self.following is not None:
            yield from self.following.metrics()

    def _counted(self, served: ServedModel | ServedApplication) -> ModelStatistics:
        return statistics_of(served.metadata.name, served.version, self.counters.by_tenant.get(served.counted_as))


def _successors(entry: NameEntry, loaded: LoadedVersions) -> list[tuple[ServedModel, ServedModel]]:
    """Pairs of a served version and the new version of the same tenant that can take its queries."""
    new = {each.tenant.name: each for each in loaded.served.values()}
    served = {id(each): each for each in entry.versions.values()}.values()
    pairs = [(each, new[each.tenant.name]) for each in served if each.tenant.name in new]
    return [(old, successor) for old, successor in pairs if successor.takes_queries_of(old)]
