"""Services: what a package adds to a server, called by the server at fixed moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client.core import Metric

from cotenant import registry
from cotenant.config import PlanSection
from cotenant.core.actions import Action
from cotenant.core.events import Event
from cotenant.core.snapshot import Policy
from cotenant.errors import ConfigError
from cotenant.execute.protocol import Timing
from cotenant.work import PlanLanes

if TYPE_CHECKING:
    from cotenant.config import ServerConfig
    from cotenant.measure.load_spec import VersionFacts
    from cotenant.predict.online import OnlineModel
    from cotenant.serve.engine.clock import Clock
    from cotenant.serve.engine.counters import Counters
    from cotenant.serve.engine.driver import Driver
    from cotenant.serve.models.name_table import NameTable
    from cotenant.serve.models.served_models import ServedModel
    from cotenant.work import Machine


class Host(Protocol):
    """The server, as services and what runs plans use it."""

    root: Path
    settings: ServerConfig
    policy: Policy
    machine: Machine
    clock: Clock
    counters: Counters
    beliefs: OnlineModel
    names: NameTable
    following: PlanView | None
    """The plan that runs, for status pages and metrics."""

    @property
    def driver(self) -> Driver:
        """The driver of the engine; raises ServeError before the server starts."""

    def served_models(self) -> list[ServedModel]:
        """The versions of all models that are served, each once."""

    def settle(self) -> None:
        """Have all services follow what is served now."""

    def change_policy(self, policy: Policy) -> None:
        """Let another policy decide, with its lanes. Raises ConfigError or ModelError, and nothing changes then."""

    def divide(self, shares_ns: Mapping[str, Mapping[str, int]]) -> None:
        """Take the deadlines of stages from how a plan divides the SLOs: nanoseconds by application and stage."""


class Service:
    """Base of services: each hook does nothing unless a subclass overrides it. One object serves one server.

    `cuts`, `changing`, `followed` and `settled` are called under the server's lock of loading, by any thread. A package
    joins by an entry point of the group `registry.SERVICES` that names a subclass.
    """

    def __init__(self, server: Host) -> None:
        self.server = server

    def start(self) -> None:
        """The driver runs, and no model is loaded yet."""

    def cuts(self, opened: VersionFacts, policy: Policy, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """The units at which a model may be left, from those of its profile: a model is about to be served."""
        return cuts

    def added(self, served: ServedModel) -> None:
        """A model is served from now on. Called between two events, before its tenant is in the engine."""

    def changing(self, policy: Policy) -> None:
        """Another policy will decide, with other lanes."""

    def followed(self, policy: Policy) -> Policy:
        """The policy with what this service has for the models that are served now; models or lanes have changed."""
        return policy

    def settled(self) -> None:
        """Models, lanes and the policy are as they stay until the next change."""

    def ready(self) -> None:
        """Everything that can be served at the start is served."""

    def close(self, until_s: float) -> None:
        """The server stops. Ends what runs in the background, by `until_s` of the monotonic clock."""


class PlanView(Protocol):
    """A plan that runs, for status pages and metrics. Thread-safe."""

    def status(self) -> Mapping[str, Any]:
        """Plan, rates and attainment as plain values."""

    def metrics(self) -> Iterator[Metric]:
        """Families of the metrics page."""


class OpenedPlan(Protocol):
    """The part of a plan file that this machine runs."""

    @property
    def lanes(self) -> PlanLanes:
        """Lanes with their rounds."""

    @property
    def shares_ns(self) -> Mapping[str, Mapping[str, int]]:
        """How the SLO of each application is divided: nanoseconds by stage."""


class PlanRun(Protocol):
    """Runs an opened plan in a server, and changes over to others. An observer of the server's driver."""

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """An event was handled."""

    def start(self) -> None:
        """Begin, once the server has started."""

    def reload(self) -> None:
        """Read the plan's file again, soon. May be called from the handler of a signal."""

    def stop(self, patience_s: float) -> None:
        """Change nothing any more; a planner at work is waited for `patience_s` at most."""


class PlanFiles(Protocol):
    """Plan files as a package serves them. A package joins by `registry.PLAN_FILES`."""

    def open(self, section: PlanSection, cores: Sequence[int], root: Path, *, stale: bool) -> OpenedPlan:
        """Read the file of `[plan]` and lay its device out on these cores. Raises PlanError, or StaleProfileError
        unless `stale`."""

    def follow(self, server: Host, opened: OpenedPlan, section: PlanSection, *, stale: bool) -> PlanRun:
        """What runs an opened plan in a server that has its lanes."""


def plan_files() -> PlanFiles:
    """What the installed packages have. Raises ConfigError when none serves plans."""
    found: PlanFiles | None = next(iter(registry.load_all(registry.PLAN_FILES).values()), None)
    if found is None:
        raise ConfigError("[plan]: no installed package serves plan files")
    return found


def services_of(server: Host) -> Sequence[Service]:
    """One object of every registered service."""
    return [kind(server) for kind in registry.load_all(registry.SERVICES).values()]
