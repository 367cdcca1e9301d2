"""Table of a server's names: the versions of a model, an application, or the reason why a name is not served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cotenant.config import NS_PER_MS
from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.protocol import ModelExecutor
from cotenant.repository import within
from cotenant.repository.application_form import VERSION
from cotenant.repository.application_spec import ApplicationSpec, read_application
from cotenant.serve.directory import Directory, Front, NameState, look_up
from cotenant.serve.models.served_application import ServedApplication, fit
from cotenant.serve.models.served_models import ServedModel
from cotenant.wire.api import IndexEntry, ServeError, Status

_log = logging.getLogger("cotenant.server")
_ABSENT = "the repository has no such model, or it was not loaded"

Served = ServedModel | ServedApplication


@dataclass(frozen=True, slots=True)
class NameEntry:
    """State of a name: served by `versions` or by `application`, or `reason` says why it is not.

    `versions`: served versions of a model by version on the wire; the default version is also under "". `unserved`:
    reasons why other versions are not served. `spec`: declaration of an application, which is served while all its
    models are. `tenant`: the tenant for which refused queries are counted.
    """

    versions: Mapping[str, ServedModel] = field(default_factory=dict)
    unserved: Mapping[str, str] = field(default_factory=dict)
    spec: ApplicationSpec | None = None
    application: ServedApplication | None = None
    reason: str = ""
    tenant: str | None = None

    @property
    def fronts(self) -> Mapping[str, Served]:
        """Served versions by version; the default version is also under ""."""
        application = self.application
        return self.versions if application is None else {"": application, VERSION: application}

    @property
    def is_served(self) -> bool:
        """Whether the name is served."""
        return bool(self.versions) or self.application is not None

    @property
    def is_declared(self) -> bool:
        """Whether the name can be unloaded: it is served, or it is an application that waits for its models."""
        return self.is_served or self.spec is not None


_UNKNOWN = NameEntry(reason=_ABSENT)


class NameTable:
    """Entries by name. An entry is replaced as a whole, so every reader sees one consistent state.

    Readers may be on any thread; methods that change an entry need the server's load lock. A name is ready as soon as
    it is served, and not while the server `is_stopping`. `executor` reports problems of workers. `on_change` is called
    when an entry has changed.
    """

    def __init__(self, root: Path, is_stopping: Callable[[], bool], executor: ModelExecutor) -> None:
        self._root = root
        self._is_stopping = is_stopping
        self._executor = executor
        self.on_change: Callable[[], None] = lambda: None
        self._entries: dict[str, NameEntry] = {}
        self._are_known = False
        self._shares_ns: Mapping[str, Mapping[str, int]] = {}

    # --- looking a name up ----------------------------------------------------------------------------------------

    def get(self, name: str) -> NameEntry:
        """Entry of a name; an unserved entry for an unknown name."""
        return self._entries.get(name, _UNKNOWN)

    def find(self, name: str, version: str) -> Served:
        """Find the served version of a name. Raises ServeError as `directory.look_up` does."""
        return look_up(self._entries.get(name), name, version, are_known=self._are_known)

    def directory(self, *, is_open: bool) -> Directory:
        """Directory of all names for front-ends. `is_open`: all models of the start are loaded."""
        names = {
            name: NameState(
                {version: self._front(each) for version, each in entry.fronts.items()},
                dict(entry.unserved),
                entry.reason,
            )
            for name, entry in list(self._entries.items())
        }
        return Directory(is_open, names, self._are_known)

    def _front(self, served: Served) -> Front:
        tenant = served.tenant.name if isinstance(served, ServedModel) else ""
        return Front(served.metadata, self.problem_of(served), tenant)

    def stage_model(self, name: str) -> ServedModel:
        """Default version of a model. Raises ServeError (UNAVAILABLE) with the reason if it is not served."""
        entry = self.get(name)
        if not entry.versions:
            reason = "it is an application, and a stage needs a model" if entry.spec is not None else entry.reason
            raise ServeError(Status.UNAVAILABLE, f"model {name!r} is not served: {reason}")
        return entry.versions[""]

    def check_workers(self, served: Served) -> None:
        """Raise ServeError (UNAVAILABLE) if a worker of this model has a lasting problem."""
        for tenant in served.tenants:
            if reason := self._executor.lasting_problem(tenant):
                text = f"model {served.metadata.name!r} is not served: {within(self._root, reason)}"
                raise ServeError(Status.UNAVAILABLE, text)

    def next_stage(self, name: str) -> ServedModel:
        """Default version of the model of a starting stage. Raises as `stage_model` and `check_workers` do."""
        served = self.stage_model(name)
        self.check_workers(served)
        return served

    @property
    def models(self) -> dict[str, Mapping[str, ServedModel]]:
        """Served models with their versions."""
        return {name: entry.versions for name, entry in list(self._entries.items()) if entry.versions}

    @property
    def applications(self) -> dict[str, ServedApplication]:
        """Served applications by name."""
        found = [(name, entry.application) for name, entry in list(self._entries.items())]
        return {name: application for name, application in found if application is not None}

    def fronts(self) -> list[Served]:
        """Every served version of the models, and the served applications, sorted by name."""
        versions = [each for known in self.models.values() for version, each in known.items() if version]
        found: list[Served] = [*versions, *self.applications.values()]
        return sorted(found, key=lambda each: each.metadata.name)

    def problem_of(self, served: Served) -> str:
        """Why a served version is not ready, or "". For the index and for readiness probes."""
        if self._is_stopping():
            return "the server is stopping"
        return within(self._root, next(filter(None, map(self._executor.problem, served.tenants)), ""))

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Repository index: a line for each version, and a line for each name that is not served."""
        lines = [line for name, entry in list(self._entries.items()) for line in self._lines(name, entry)]
        kept = [line for line in lines if not ready_only or line.state == "READY"]
        return sorted(kept, key=lambda line: (line.name, line.version))

    def _lines(self, name: str, entry: NameEntry) -> Iterator[IndexEntry]:
        versions: list[Served] = [served for version, served in entry.versions.items() if version]
        for served in [entry.application] if entry.application is not None else versions:
            problem = self.problem_of(served)
            yield IndexEntry(name, served.version, "UNAVAILABLE" if problem else "READY", problem)
        for version, reason in entry.unserved.items():
            if version not in entry.versions:  # else the version before a failed reload is still served
                yield IndexEntry(name, version, "UNAVAILABLE", reason)
        if not entry.is_served:
            yield IndexEntry(name, "", "UNAVAILABLE", entry.reason)

    # --- changing what serves a name ------------------------------------------------------------------------------

    def expect(self, names: Sequence[str]) -> None:
        """Record the names of the repository, in the order in which the server will load them."""
        for place, name in enumerate(names):
            before = f"{place} model{'s' if place > 1 else ''} before it" if place else "it is the first"
            self._entries[name] = NameEntry(reason=f"it is starting: it waits to be loaded, {before}")
        self._are_known = True
        self.on_change()

    def loading(self, name: str, step: str) -> None:
        """Record the step of a load, as the reason why the name is not served; a served name stays as it is."""
        entry = self.get(name)
        if not entry.is_declared:
            self._set(name, replace(entry, reason=f"it is starting: {step}"))

    def put_model(self, name: str, versions: Mapping[str, ServedModel], unserved: Mapping[str, str]) -> None:
        """Serve a name by a model."""
        self._set(name, NameEntry(versions, unserved, tenant=versions[""].tenant.name))

    def put_application(self, spec: ApplicationSpec, made: ServedApplication) -> None:
        """Serve a name by an application."""
        before = self._entries.get(spec.name)
        self._set(spec.name, NameEntry(spec=spec, application=made))
        if before is None or before.application is None:
            slo_ms = spec.slo_ns / NS_PER_MS
            _log.info("application %r is served: slo %g ms, stages %s", spec.name, slo_ms, spec.stages_text)

    def note(self, name: str, unserved: Mapping[str, str]) -> None:
        """Record why other versions of a served model are not served."""
        entry = self._entries.get(name)
        if entry is not None and entry.versions:
            self._set(name, replace(entry, unserved=unserved))

    def refuse(self, name: str, error: object, spec: ApplicationSpec | None = None) -> str:
        """Record a failed load. A served entry stays as it is; another entry gets the reason and `spec`.

        `spec` is the declaration of an application with models that are not served. Returns the reason for clients.
        """
        entry, reason = self.get(name), within(self._root, error)
        if not entry.is_served:
            tenant = entry.tenant or (None if spec is not None else name)
            self._set(name, NameEntry(spec=spec, reason=reason, tenant=tenant))
        return reason

    def take(self, name: str, reason: str) -> NameEntry:
        """Stop serving a name, with a reason. Returns its previous entry."""
        before = self.get(name)
        self._set(name, NameEntry(reason=reason, tenant=before.tenant))
        return before

    def _set(self, name: str, entry: NameEntry) -> None:
        self._entries[name] = entry
        self.on_change()

    # --- applications ---------------------------------------------------------------------------------------------

    def read_application(self, name: str) -> ApplicationSpec:
        """Read the declaration of an application. Raises ConfigError for an invalid one or a name conflict."""
        spec = read_application(self._root, name)
        model = self.owners(but=name).get(name)
        if model is not None:
            raise ConfigError(
                f"{spec.path}: application {name!r} has the same name as the tenant of model {model!r}: rename the "
                "directory, or change the model's tenant.name"
            )
        return spec

    def fit(self, spec: ApplicationSpec) -> ServedApplication:
        """Match an application with the served models. Raises CotenantError with the mismatch."""
        return fit(spec, self.stage_model, self._shares_ns.get(spec.name))

    def follow(self) -> None:
        """Update which applications are served, after a change of models or of the plan."""
        for name, entry in list(self._entries.items()):
            if entry.spec is None:
                continue
            try:
                self.put_application(entry.spec, self.fit(entry.spec))
            except CotenantError as error:
                reason = within(self._root, error)
                if reason != entry.reason:
                    _log.warning("application %r is not served: %s", name, error)
                self._set(name, NameEntry(spec=entry.spec, reason=reason))

    def divide(self, shares_ns: Mapping[str, Mapping[str, int]]) -> None:
        """Set stage budgets from a plan: nanoseconds by application and stage.

        An application with other stage names keeps the budgets that follow from predicted latency.
        """
        if shares_ns == self._shares_ns:
            return
        self._shares_ns = shares_ns
        for name, entry in self._entries.items():
            planned = shares_ns.get(name, {})
            if planned and entry.spec is not None and entry.spec.graph.divided(planned).share_ends_ns is None:
                _log.warning(
                    "the plan has budgets for the stages %s of application %r, but its stages are %s: their deadlines "
                    "follow from predicted latency instead; plan again",
                    *(", ".join(planned), name, ", ".join(entry.spec.graph.names)),
                )
        self.follow()

    # --- tenants --------------------------------------------------------------------------------------------------

    def owners(self, but: str = "") -> dict[str, str]:
        """Served models by tenant, without the model `but`."""
        models = self.models.items()
        return {each.tenant.name: name for name, known in models if name != but for each in known.values()}

    def check_tenants(self, names: list[str], model: str) -> None:
        """Raise ConfigError if a tenant of the model has the name of an application."""
        for name in names:
            if name != model and self.get(name).spec is not None:
                raise ConfigError(
                    f"model {model!r}: tenant {name!r} has the same name as an application of the repository: change "
                    "tenant.name in its config.toml"
                )
