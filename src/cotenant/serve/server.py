"""The server behind the front-ends: models of a repository, their tenants, and the driver that serves them."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cotenant.config import ServerConfig
from cotenant.core.engine import Engine
from cotenant.core.events import (
    DrainStarted,
    PolicyChanged,
    PredictorChanged,
    QueryCancelled,
    TenantAdded,
    TenantRemoved,
)
from cotenant.core.snapshot import Policy
from cotenant.errors import CotenantError
from cotenant.execute.layout import device_cores
from cotenant.execute.registry import layout_of, open_executor
from cotenant.measure.layout_facts import fitted_groups
from cotenant.policies.registry import make_policy
from cotenant.predict.groups.overlap import OverlapPredictor
from cotenant.predict.online import OnlineModel
from cotenant.repository import (
    UnknownModelError,
    application_names,
    is_application,
    model_names,
    within,
)
from cotenant.serve.brain.clock import Clock, RealClock
from cotenant.serve.brain.counters import Counters
from cotenant.serve.brain.driver import Driver, Observer
from cotenant.serve.brain.flows import Flows
from cotenant.serve.brain.groups import foresee, knowing, learn_groups
from cotenant.serve.brain.merge_check import MergeCheck
from cotenant.serve.brain.plan_lanes import PlanLanes
from cotenant.serve.brain.plan_view import PlanFigures, PlanView
from cotenant.serve.brain.pressure_monitor import PressureMonitor, monitor_of
from cotenant.serve.brain.queries import Done, answer, figures_of, query_of, statistics_of, told_of_refusals, waiting_of
from cotenant.serve.brain.reorganise import change
from cotenant.serve.brain.replies import Replies
from cotenant.serve.brain.slo_watch import log_served, log_turns
from cotenant.serve.brain.together import TogetherPlans
from cotenant.serve.metrics_page import MetricsPage
from cotenant.serve.opener.application_registry import ApplicationRegistry
from cotenant.serve.opener.served_application import ServedApplication
from cotenant.serve.opener.served_models import ServedModel
from cotenant.serve.opener.versions import ModelOpener
from cotenant.trace.lost import LossAccount
from cotenant.wire.api import IndexEntry, InferRequest, InferResult, ModelMetadata, ModelStatistics, ServeError, Status

_log = logging.getLogger("cotenant.server")


class Server:
    """Serves a model repository. Implements `Backend`; front-ends are attached by the caller.

    Constructing it does no I/O; `start` loads the models. A model that cannot be loaded stays in the index with the
    reason, and the others are served. `plan` gives the lanes and their rounds in place of the settings.
    """

    def __init__(
        self, root: Path, settings: ServerConfig, *, clock: Clock | None = None, plan: PlanLanes | None = None
    ) -> None:
        self.root = root.resolve()
        self.settings = settings
        cores = device_cores(settings.device)
        layout = layout_of(settings.device)
        self.lanes = layout.lanes(settings.device, cores, "[device]") if plan is None else plan.lanes
        self.machine = layout.machine(self.lanes, cores)
        asked, rounds = settings.policy, () if plan is None else plan.rounds
        self.policy = make_policy(asked.name, asked.options, self.lanes, rounds)
        self.clock = clock or RealClock()
        self.counters = Counters(partial(log_turns, self.clock))
        self.beliefs = OnlineModel.under(self.policy)
        self.losses = LossAccount(self.beliefs.predictor, self.lanes)
        self.counters.leading_cause = self.losses.leading
        self._replies = Replies(self.clock, self.counters, self.beliefs)
        self._groups: OverlapPredictor | None = None
        self._executor = open_executor(settings.device, self.policy.shares, settings.server.max_answer_bytes)
        self._models: dict[str, dict[str, ServedModel]] = {}
        self._failed: dict[str, str] = {}
        self._counted_as: dict[str, str] = {}  # tenants of models that are, or were, served
        self._loading = threading.Lock()
        self._is_ready = False
        self.following: PlanView | None = None
        """What runs a plan and follows the load, for those who look on."""
        looks = lambda: waiting_of(self._driver), self._executor, self._figures
        self._checks = MergeCheck(settings.integrity.sample, lambda: self.driver, self.counters.leave_out)
        more = self.losses.lost, self._checks.results, lambda: figures_of(self._driver)
        self._page = MetricsPage(self.counters.by_tenant, *looks, *more)
        self._driver: Driver | None = None
        self._pressure: PressureMonitor | None = None
        steers = lambda: self.driver, self.clock, self.counters, self.beliefs
        self._flows = Flows(*steers, self._stage_model, self._checks.watched)
        self._applications = ApplicationRegistry(self.root, self._stage_model, self._owners, self.counters, self._flows)
        self._together = TogetherPlans(self.root, self._settle)
        told = self._together.of, self._applications.check_tenants
        self.opener = ModelOpener(self.root, settings, self._executor, *told)

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self, *extra: Observer) -> None:
        """Load the models and accept queries. `extra` observers are told every event, before any tenant is there."""
        engine = Engine((), self.policy, self.beliefs.predictor, self.machine)
        observers: tuple[Observer, ...] = (self.losses, self.counters, self.beliefs, self._checks, *extra)
        self._driver = Driver(engine, self._executor, self.clock, observers)
        self._executor.on_event = self._driver.post
        if self.policy.asks_groups:
            self._groups = fitted_groups(self.root)
        names = model_names(self.root)
        if not names:
            text = "add MODEL/config.toml and MODEL/1/model.onnx (or model.pt2), then load MODEL through the API"
            _log.warning("%s holds no models yet: %s", self.root.name, text)
        self._together.read()
        for name in (*names, *application_names(self.root)):
            try:
                self.load(name)
            except ServeError:
                if self.opener.loader.is_cancelled:
                    return
                continue  # logged, and shown in the index
        self._settle()
        gc.collect()
        gc.freeze()  # what is loaded now lives as long as the process: keep it out of every later collection
        cores = tuple(core for device in self.machine.devices for core in device.cores)
        self._pressure = monitor_of(self.root, self.driver, self.beliefs, cores)
        if self._pressure is not None:
            self._pressure.start()
        self._is_ready = True
        index = self.index(ready_only=False)
        ready = {entry.name for entry in index if entry.state == "READY"}
        _log.info("ready: %d of %d models", len(ready), len({entry.name for entry in index}))

    def stop(self) -> None:
        """Refuse new queries, serve those inside for `drain_s`, fail the rest, and stop."""
        self._is_ready = False
        self.opener.loader.close()
        self._together.close()
        if self._pressure is not None:
            self._pressure.close()
        if self._driver is not None:
            drain_s = self.settings.server.drain_s
            until_s = time.monotonic() + drain_s
            self._flows.refuse()
            self._driver.post(DrainStarted())
            self._flows.wait_idle(drain_s)  # between two stages nothing of a query is in the core
            if not self._driver.wait_idle(max(0.0, until_s - time.monotonic())):
                _log.warning("not all queries ended within drain_s = %g", drain_s)
            for name in list(self._models):
                self._remove(name, "the server stopped")
            self._driver.wait_idle(drain_s)
        self._executor.close()
        self.clock.close()

    @property
    def driver(self) -> Driver:
        """The driver; only after `start`."""
        if self._driver is None:
            raise CotenantError("the server has not been started")
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
            served = self._front(model, version)
        except ServeError as error:
            if error.status is Status.UNAVAILABLE:
                return False
            raise
        return self._is_ready and not any(map(self._executor.problem, served.tenants))

    def metadata(self, model: str, version: str) -> ModelMetadata:
        """See Backend."""
        return self._front(model, version).metadata

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        """See Backend."""
        return self._front(model, version).config()

    def statistics(self, model: str, version: str) -> Sequence[ModelStatistics]:
        """See Backend."""
        if model:
            return [self._counted(self._front(model, version))]
        served = [each for known in list(self._models.values()) for version, each in known.items() if version]
        fronts: list[ServedModel | ServedApplication] = [*served, *self._applications.served.values()]
        return [self._counted(each) for each in sorted(fronts, key=lambda each: each.metadata.name)]

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """See Backend."""
        entries = [
            IndexEntry(name, version, "READY", within(self.root, self._executor.problem(served.tenant.name)))
            for name, versions in list(self._models.items())
            for version, served in versions.items()
            if version
        ]
        if not ready_only:
            entries += self.opener.index(self._models)
            entries += [IndexEntry(name, "", "UNAVAILABLE", reason) for name, reason in list(self._failed.items())]
        entries += self._applications.index(ready_only=ready_only)
        return sorted(entries, key=lambda entry: (entry.name, entry.version))

    def load(self, model: str) -> None:
        """See Backend. Raises ServeError (NOT_FOUND, INVALID_ARGUMENT) with what is wrong and how to mend it."""
        with self._loading:
            if is_application(self.root, model):
                self._applications.load(model)
            else:
                with self.driver.opening(model):
                    self._load_model(model)
        if self._is_ready:
            self._settle()

    def unload(self, model: str) -> None:
        """See Backend."""
        with self._loading:
            if self._applications.unload(model):
                return
            if model not in self._models:
                raise ServeError(Status.NOT_FOUND, f"model {model!r} is not loaded")
            self._failed[model] = "it was unloaded"
            self._remove(model, "the model was unloaded")
            self._applications.follow()

    def submit(self, request: InferRequest, done: Done) -> int:
        """See Backend."""
        known = self._counted_as.get(request.model, request.model if request.model in self._failed else None)
        with told_of_refusals(self._driver, self.clock, request, known):
            served = self._front(request.model, request.version)
            if isinstance(served, ServedApplication):
                return self._flows.submit(served, request, done)
            form, inputs = served.form(request), request.inputs
            told = self._checks.watched(served, form, inputs, partial(answer, done, served.version, self.clock))
            return self.driver.submit(partial(query_of, served, form, request, self.counters), inputs, told)

    def cancel(self, query: int) -> None:
        """See Backend."""
        if not self._flows.cancel(query):
            self.driver.post(QueryCancelled(query))

    def replied(self, result: InferResult) -> None:
        """See Backend."""
        if (late := self._replies.written(result, learns=self.policy.cautious)) is not None:
            self.driver.post(late)

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
            served = {id(each): each for versions in self._models.values() for each in versions.values()}.values()
            if policy.asks_groups and self._groups is None:
                self._groups = learn_groups(self.driver, self.beliefs, self.root, served)
            change(self.driver, self._executor, self.beliefs, list(served), self.policy, policy)
            self.policy, self.lanes = policy, policy.lanes
        self._settle()

    def divide(self, shares_ns: Mapping[str, Mapping[str, int]]) -> None:
        """Take the deadlines of stages from how a plan divides the SLOs: nanoseconds by application and stage."""
        with self._loading:
            self._applications.divide(shares_ns)

    # --- models ---------------------------------------------------------------------------------------------------

    def _refuse(self, model: str, reason: str) -> str:
        """A model cannot be loaded; what is served of it stays. Gives the reason as clients are told it."""
        _log.error("model %r is not loaded: %s", model, reason)
        told = within(self.root, reason)
        if model not in self._models:
            self._failed[model] = told
        return told

    def _front(self, model: str, version: str) -> ServedModel | ServedApplication:
        """What clients call a model."""
        return self._applications.find(model, version) or self._find(model, version)

    def _stage_model(self, model: str) -> ServedModel:
        """The default version of a model. Raises ServeError (UNAVAILABLE) with the reason when it is not served."""
        versions = self._models.get(model)
        if versions is None:
            reason = self._failed.get(model, "there is no such model in the repository, or it was not loaded")
            raise ServeError(Status.UNAVAILABLE, f"model {model!r} is not served: {reason}")
        return versions[""]

    def _owners(self) -> dict[str, str]:
        """The models that are served, by tenant."""
        return {served.tenant.name: name for name, known in self._models.items() for served in known.values()}

    def _find(self, model: str, version: str) -> ServedModel:
        versions = self._models.get(model)
        if versions is None:
            if not self._is_ready:
                raise ServeError(Status.UNAVAILABLE, f"model {model!r}: the server is starting or shutting down")
            reason = self._failed.get(model)
            if reason is not None:
                raise ServeError(Status.UNAVAILABLE, f"model {model!r} is not served: {reason}")
            versions = self._models.get(model)  # a reload may have ended since the first look
        if versions is None:
            raise ServeError(Status.NOT_FOUND, f"model {model!r} is unknown; 'v2/repository/index' lists the models")
        served = versions.get(version)
        if served is None and (reason := self.opener.why(model, version)):
            raise ServeError(Status.UNAVAILABLE, f"model {model!r} version {version} is not served: {reason}")
        if served is None:
            known = ", ".join(name for name in versions if name)
            raise ServeError(Status.NOT_FOUND, f"model {model!r} has no version {version!r}; it has {known}")
        return served

    def _load_model(self, model: str) -> None:
        try:
            opened = self.opener.open(model, self.policy, self._owners(), is_served=model in self._models)
        except UnknownModelError as error:
            raise ServeError(Status.NOT_FOUND, str(error)) from None
        except CotenantError as error:
            status = error.status if isinstance(error, ServeError) else Status.INVALID_ARGUMENT
            raise ServeError(status, self._refuse(model, str(error))) from None
        if model in self._models:
            self._failed[model] = "it is being reloaded"
            self._remove(model, "the model was reloaded")
        self._add(model, opened.served)
        self._failed.pop(model, None)
        self._applications.follow()
        if opened.refusal is not None:
            raise opened.refusal

    def _settle(self) -> None:
        """Look ahead, and follow plans, for the models, the lanes and the plans that there are now."""
        with self._loading:
            foresee(self.driver, self.policy)
            policy = self._together.followed(self.policy, [versions[""] for versions in self._models.values()])
            if policy is not self.policy:
                self.policy = policy
                self.driver.post(PolicyChanged(policy))
            self._together.seek(policy, self._applications.served.values())

    def _add(self, model: str, versions: dict[str, ServedModel]) -> None:
        new = list({id(served): served for served in versions.values()}.values())
        for served in new:
            self._executor.add_model(served.tenant.name, served.loaded)
        self.driver.follow(partial(self._open_books, new))
        for served in new:
            self.driver.post(TenantAdded(served.tenant))
            self._executor.announce(served.tenant.name)
        self._models[model] = versions
        tenant = versions[""].tenant
        self._counted_as[model] = tenant.name
        log_served(model, tenant, self.beliefs.alone_ns(tenant.name))

    def _open_books(self, new: Sequence[ServedModel], _: Engine) -> PredictorChanged:
        """Start to count and to predict for tenants; between two events, since observers write there too."""
        for served in new:
            name = served.tenant.name
            self.counters.add(name, served.tenant.slo_ns)
            self.beliefs.add(name, served.profile.table(self.settings.predict.quantile))
            if self._groups is not None:
                self._groups = knowing(self._groups, self.root, name, served.profile.table("p50"))
                self.beliefs.believe_groups(self._groups)
        return PredictorChanged(self.beliefs.predictor)

    def _remove(self, model: str, reason: str) -> None:
        versions = self._models.pop(model)
        for served in {id(served): served for served in versions.values()}.values():
            served.is_over = True
            self.driver.post(TenantRemoved(served.tenant.name, reason))
            self._executor.remove_model(served.tenant.name)
            served.loaded.close()

    # --- looking on --------------------------------------------------------------------------------------------------

    def _figures(self) -> PlanFigures | None:
        return None if self.following is None else self.following.figures()

    def _counted(self, served: ServedModel | ServedApplication) -> ModelStatistics:
        return statistics_of(served.metadata.name, served.version, self.counters.by_tenant.get(served.counted_as))
