"""The applications of a server: which are declared, which are served now, and why the others are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cotenant.config import NS_PER_MS
from cotenant.errors import ConfigError, CotenantError
from cotenant.repository import within
from cotenant.repository.application_form import VERSION
from cotenant.repository.application_spec import ApplicationSpec, read_application
from cotenant.serve.brain.counters import Counters
from cotenant.serve.brain.flows import Flows
from cotenant.serve.opener.served_application import FindModel, ServedApplication, fit
from cotenant.wire.api import IndexEntry, ServeError, Status

_log = logging.getLogger("cotenant.server")


class ApplicationRegistry:
    """Follows the models: an application is served while all its models are. `owners` gives models by tenant.

    Everything but `find` is called under the server's lock of loading.
    """

    def __init__(
        self,
        root: Path,
        find: FindModel,
        owners: Callable[[], Mapping[str, str]],
        counters: Counters,
        flows: Flows,
    ) -> None:
        self._root = root
        self._find_model = find
        self._owners = owners
        self._counters = counters
        self.flows = flows
        self._shares_ns: Mapping[str, Mapping[str, int]] = {}
        self._specs: dict[str, ApplicationSpec] = {}
        self.served: dict[str, ServedApplication] = {}
        self.failed: dict[str, str] = {}

    def find(self, name: str, version: str) -> ServedApplication | None:
        """The application of this name; None when there is none. Raises ServeError for one that is not served."""
        found = self.served.get(name)
        if found is None:
            reason = self.failed.get(name)
            if reason is not None:
                raise ServeError(Status.UNAVAILABLE, f"model {name!r} is not served: {reason}")
            found = self.served.get(name)  # it may have been fitted anew since the first look
        if found is not None and version not in ("", VERSION):
            raise ServeError(Status.NOT_FOUND, f"model {name!r} has no version {version!r}; it has {VERSION}")
        return found

    def load(self, name: str) -> None:
        """Load or reload an application; queries under way go on as they began.

        Raises ServeError (NOT_FOUND, INVALID_ARGUMENT, UNAVAILABLE) with what is wrong. One whose models are not all
        served is remembered, and served as soon as they are.
        """
        try:
            spec = read_application(self._root, name)
            self._check_name(spec)
        except CotenantError as error:
            told = within(self._root, error)
            if name not in self.served:
                self._specs.pop(name, None)
                self.failed[name] = told
            _log.error("application %r is not loaded: %s", name, error)
            raise ServeError(Status.INVALID_ARGUMENT, told) from None
        self._specs[name] = spec
        self._counters.add(name, spec.slo_ns)
        self._refit(name)
        if name not in self.served:
            raise ServeError(Status.UNAVAILABLE, self.failed[name])

    def unload(self, name: str) -> bool:
        """Stop serving an application; its queries fail. False when there is none of that name."""
        if self._specs.pop(name, None) is None:
            return False
        self.failed[name] = "it was unloaded"
        self.served.pop(name, None)
        self.flows.fail(name, "the application was unloaded")
        self._counters.remove(name)
        return True

    def follow(self) -> None:
        """Models, or the plan, have changed: see anew which applications are served."""
        for name in self._specs:
            self._refit(name)

    def divide(self, shares_ns: Mapping[str, Mapping[str, int]]) -> None:
        """Deadlines of stages are the ends of these shares from now on: nanoseconds by application and stage.

        An application whose stages are called otherwise keeps those that follow from predicted latency.
        """
        if shares_ns == self._shares_ns:
            return
        self._shares_ns = shares_ns
        for name, spec in self._specs.items():
            planned = shares_ns.get(name, {})
            if planned and spec.graph.planned_ends_ns(planned) is None:
                _log.warning(
                    "the plan divides the SLO of application %r over the stages %s, and its stages are %s: their "
                    "deadlines follow from predicted latency instead",
                    *(name, ", ".join(planned), ", ".join(spec.graph.names)),
                )
        self.follow()

    def check_tenants(self, names: Iterable[str], model: str) -> None:
        """See to it that no tenant is called like an application. Raises ConfigError."""
        for name in names:
            if name in self._specs:
                raise ConfigError(
                    f"model {model!r}: tenant {name!r} is called like an application of the repository: give "
                    "tenant.name another value in its config.toml"
                )

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """The lines of the repository index."""
        entries = [IndexEntry(name, VERSION, "READY") for name in list(self.served)]
        if not ready_only:
            entries += [IndexEntry(name, "", "UNAVAILABLE", reason) for name, reason in list(self.failed.items())]
        return entries

    def _check_name(self, spec: ApplicationSpec) -> None:
        model = self._owners().get(spec.name)
        if model is not None:
            raise ConfigError(
                f"{spec.path}: application {spec.name!r} is called like the tenant of model {model!r}, expected a name "
                "of its own: give the directory another name, or the model's tenant.name another value"
            )

    def _refit(self, name: str) -> None:
        spec = self._specs[name]
        before = self.served.get(name)
        try:
            made = fit(spec, self._find_model, self._shares_ns.get(name))
        except CotenantError as error:
            reason = self.failed.get(name)
            self.failed[name] = within(self._root, error)
            self.served.pop(name, None)
            if self.failed[name] != reason:
                _log.warning("application %r is not served: %s", name, error)
            return
        self.served[name] = made
        self.failed.pop(name, None)
        if before is None:
            slo_ms = spec.slo_ns / NS_PER_MS
            _log.info("application %r is served: slo %g ms, stages %s", name, slo_ms, spec.stages_text)
