"""The names of a server: what serves each, the versions of a model or an application, or why nothing does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
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
_ABSENT = "there is no such model in the repository, or it was not loaded"

Served = ServedModel | ServedApplication


@dataclass(frozen=True, slots=True)
class NameEntry:
    """What is known of a name. It is served by `versions` or by `application`, or `reason` says why it is not.

    `versions` holds a model's versions by their names on the wire, and the default one under "" too. `unserved` holds
    the reasons why further versions of that model are not served. `spec` is what the repository declares of an
    application: it is served while all its models are. `tenant` is the name under which refused queries are counted.
    """

    versions: Mapping[str, ServedModel] = field(default_factory=dict)
    unserved: Mapping[str, str] = field(default_factory=dict)
    spec: ApplicationSpec | None = None
    application: ServedApplication | None = None
    reason: str = ""
    tenant: str | None = None

    @property
    def fronts(self) -> Mapping[str, Served]:
        """What serves the name, by version; the default one is under "" too."""
        application = self.application
        return self.versions if application is None else {"": application, VERSION: application}

    @property
    def is_served(self) -> bool:
        """Whether a model or an application serves the name."""
        return bool(self.versions) or self.application is not None

    @property
    def is_declared(self) -> bool:
        """Whether it can be unloaded: it is served, or is an application that waits for its models."""
        return self.is_served or self.spec is not None


_UNKNOWN = NameEntry(reason=_ABSENT)


class NameTable:
    """One entry a name; entries are replaced as a whole, so that every reader sees one state of a name.

    Readers are on any thread. Everything that changes an entry is called under the server's lock of loading.
    `is_open` tells whether queries are accepted. `executor` tells why tenants cannot be served. `on_change` is called
    when an entry has changed.
    """

    def __init__(self, root: Path, is_open: Callable[[], bool], executor: ModelExecutor) -> None:
        self._root = root
        self._is_open = is_open
        self._executor = executor
        self.on_change: Callable[[], None] = lambda: None
        self._entries: dict[str, NameEntry] = {}
        self._shares_ns: Mapping[str, Mapping[str, int]] = {}

    # --- looking a name up ----------------------------------------------------------------------------------------

    def get(self, name: str) -> NameEntry:
        """The entry of a name; one that serves nothing for an unknown name."""
        return self._entries.get(name, _UNKNOWN)

    def find(self, name: str, version: str) -> Served:
        """What serves a name. Raises ServeError: NOT_FOUND for what is unknown, UNAVAILABLE with the reason."""
        return look_up(self._entries.get(name), name, version, is_open=self._is_open())

    def directory(self) -> Directory:
        """What front-ends know of all names."""
        names = {
            name: NameState(
                {version: self._front(each) for version, each in entry.fronts.items()},
                dict(entry.unserved),
                entry.reason,
            )
            for name, entry in list(self._entries.items())
        }
        return Directory(self._is_open(), names)

    def _front(self, served: Served) -> Front:
        tenant = served.tenant.name if isinstance(served, ServedModel) else ""
        return Front(served.metadata, self.problem_of(served), tenant)

    def stage_model(self, name: str) -> ServedModel:
        """The default version of a model. Raises ServeError (UNAVAILABLE) with the reason when it is not served."""
        entry = self.get(name)
        if not entry.versions:
            reason = "it is an application, expected a model" if entry.spec is not None else entry.reason
            raise ServeError(Status.UNAVAILABLE, f"model {name!r} is not served: {reason}")
        return entry.versions[""]

    def check_workers(self, served: Served) -> None:
        """Refuse at once what no worker will run, as far as is known. Raises ServeError (UNAVAILABLE)."""
        for tenant in served.tenants:
            if reason := self._executor.lasting_problem(tenant):
                told = within(self._root, reason)
                raise ServeError(Status.UNAVAILABLE, f"model {served.metadata.name!r} is not served: {told}")

    def next_stage(self, name: str) -> ServedModel:
        """The model of a stage that begins. Raises as `stage_model` and `check_workers` do."""
        served = self.stage_model(name)
        self.check_workers(served)
        return served

    @property
    def models(self) -> dict[str, Mapping[str, ServedModel]]:
        """The models that are served, each with its versions."""
        return {name: entry.versions for name, entry in list(self._entries.items()) if entry.versions}

    @property
    def applications(self) -> dict[str, ServedApplication]:
        """The applications that are served."""
        found = [(name, entry.application) for name, entry in list(self._entries.items())]
        return {name: application for name, application in found if application is not None}

    def fronts(self) -> list[Served]:
        """All that clients can ask: every version of the models, and the applications, by name."""
        versions = [each for known in self.models.values() for version, each in known.items() if version]
        found: list[Served] = [*versions, *self.applications.values()]
        return sorted(found, key=lambda each: each.metadata.name)

    def problem_of(self, served: Served) -> str:
        """Why what serves a name is not ready, or "": for the index and for the readiness of a model."""
        if not self._is_open():
            return "the server is starting or shutting down"
        return within(self._root, next(filter(None, map(self._executor.problem, served.tenants)), ""))

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """The lines of the repository index: a line a version, and one for a name that nothing serves."""
        lines = [line for name, entry in list(self._entries.items()) for line in self._lines(name, entry)]
        kept = [line for line in lines if not ready_only or line.state == "READY"]
        return sorted(kept, key=lambda line: (line.name, line.version))

    def _lines(self, name: str, entry: NameEntry) -> Iterator[IndexEntry]:
        versions: list[Served] = [served for version, served in entry.versions.items() if version]
        for served in [entry.application] if entry.application is not None else versions:
            problem = self.problem_of(served)
            yield IndexEntry(name, served.version, "UNAVAILABLE" if problem else "READY", problem)
        for version, reason in entry.unserved.items():
            if version not in entry.versions:  # else it is served as it was before a reload that failed
                yield IndexEntry(name, version, "UNAVAILABLE", reason)
        if not entry.is_served:
            yield IndexEntry(name, "", "UNAVAILABLE", entry.reason)

    # --- changing what serves a name ------------------------------------------------------------------------------

    def put_model(self, name: str, versions: Mapping[str, ServedModel], unserved: Mapping[str, str]) -> None:
        """Let a model serve a name."""
        self._set(name, NameEntry(versions, unserved, tenant=versions[""].tenant.name))

    def put_application(self, spec: ApplicationSpec, made: ServedApplication) -> None:
        """Let an application serve a name."""
        before = self._entries.get(spec.name)
        self._set(spec.name, NameEntry(spec=spec, application=made))
        if before is None or before.application is None:
            slo_ms = spec.slo_ns / NS_PER_MS
            _log.info("application %r is served: slo %g ms, stages %s", spec.name, slo_ms, spec.stages_text)

    def note(self, name: str, unserved: Mapping[str, str]) -> None:
        """A model goes on, and this is why further versions of it are not served."""
        entry = self._entries.get(name)
        if entry is not None and entry.versions:
            self._set(name, replace(entry, unserved=unserved))

    def refuse(self, name: str, error: object, spec: ApplicationSpec | None = None) -> str:
        """A load has failed: an entry that serves something stays as it is, another one gets the reason, and what is
        declared of an application whose models are not all served. Gives the reason as clients are told it.
        """
        entry, told = self.get(name), within(self._root, error)
        if not entry.is_served:
            tenant = entry.tenant or (None if spec is not None else name)
            self._set(name, NameEntry(spec=spec, reason=told, tenant=tenant))
        return told

    def take(self, name: str, reason: str) -> NameEntry:
        """Let nothing serve a name, for a reason. Gives what it was before."""
        before = self.get(name)
        self._set(name, NameEntry(reason=reason, tenant=before.tenant))
        return before

    def _set(self, name: str, entry: NameEntry) -> None:
        self._entries[name] = entry
        self.on_change()

    # --- applications ---------------------------------------------------------------------------------------------

    def read_application(self, name: str) -> ApplicationSpec:
        """What the repository declares of an application. Raises ConfigError with what is wrong."""
        spec = read_application(self._root, name)
        model = self.owners(but=name).get(name)
        if model is not None:
            raise ConfigError(
                f"{spec.path}: application {name!r} is called like the tenant of model {model!r}, expected a name "
                "of its own: give the directory another name, or the model's tenant.name another value"
            )
        return spec

    def fit(self, spec: ApplicationSpec) -> ServedApplication:
        """Fit an application to the models that are served. Raises CotenantError with what does not fit."""
        return fit(spec, self.stage_model, self._shares_ns.get(spec.name))

    def follow(self) -> None:
        """Models, or the plan, have changed: see anew which applications are served."""
        for name, entry in list(self._entries.items()):
            if entry.spec is None:
                continue
            try:
                self.put_application(entry.spec, self.fit(entry.spec))
            except CotenantError as error:
                told = within(self._root, error)
                if told != entry.reason:
                    _log.warning("application %r is not served: %s", name, error)
                self._set(name, NameEntry(spec=entry.spec, reason=told))

    def divide(self, shares_ns: Mapping[str, Mapping[str, int]]) -> None:
        """Deadlines of stages are the ends of these shares from now on: nanoseconds by application and stage.

        An application with other names of stages keeps those that follow from predicted latency.
        """
        if shares_ns == self._shares_ns:
            return
        self._shares_ns = shares_ns
        for name, entry in self._entries.items():
            planned = shares_ns.get(name, {})
            if planned and entry.spec is not None and entry.spec.graph.divided(planned).share_ends_ns is None:
                _log.warning(
                    "the plan divides the SLO of application %r over the stages %s, and its stages are %s: their "
                    "deadlines follow from predicted latency instead",
                    *(name, ", ".join(planned), ", ".join(entry.spec.graph.names)),
                )
        self.follow()

    # --- tenants --------------------------------------------------------------------------------------------------

    def owners(self, but: str = "") -> dict[str, str]:
        """The models that are served, by tenant, except the model `but`."""
        models = self.models.items()
        return {each.tenant.name: name for name, known in models if name != but for each in known.values()}

    def check_tenants(self, names: list[str], model: str) -> None:
        """See to it that no tenant of a model is called like another name's application. Raises ConfigError."""
        for name in names:
            if name != model and self.get(name).spec is not None:
                raise ConfigError(
                    f"model {model!r}: tenant {name!r} is called like an application of the repository: give "
                    "tenant.name another value in its config.toml"
                )
