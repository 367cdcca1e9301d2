"""Services: hooks by which a technique package extends a server."""

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
    """The server as services and plan runners use it."""

    root: Path
    settings: ServerConfig
    policy: Policy
    machine: Machine
    clock: Clock
    counters: Counters
    beliefs: OnlineModel
    names: NameTable
    following: PlanView | None
    """The running plan, for status pages and metrics; None without a plan."""

    @property
    def driver(self) -> Driver:
        """Driver of the engine. Raises ServeError before the server starts."""

    def served_models(self) -> list[ServedModel]:
        """Served versions of all models, each once."""

    def settle(self) -> None:
        """Let all services adapt to the models and lanes served now."""

    def change_policy(self, policy: Policy) -> None:
        """Replace the policy and its lanes. Raises ConfigError or ModelError; then nothing has changed."""

    def divide(self, shares_ns: Mapping[str, Mapping[str, int]]) -> None:
        """Set the stage budgets of applications from a plan: nanoseconds by application and stage."""


class Service:
    """Base class of services: each hook does nothing by default. One object serves one server.

    `cuts`, `changing`, `followed` and `settled` run under the server's load lock, on any thread. A package registers a
    subclass by an entry point of the group `registry.SERVICES`.
    """

    def __init__(self, server: Host) -> None:
        self.server = server

    def start(self) -> None:
        """Called when the driver runs and no model is loaded yet."""

    def cuts(self, opened: VersionFacts, policy: Policy, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the cuts (unit indices) of a model that is about to be served; `cuts` are those of its profile."""
        return cuts

    def added(self, served: ServedModel) -> None:
        """Called when a model goes into service: between two events, before the engine has its tenant."""

    def changing(self, policy: Policy) -> None:
        """Called before another policy with other lanes is set."""

    def followed(self, policy: Policy) -> Policy:
        """Return the policy with this service's data for the models served now. Called when models or lanes changed."""
        return policy

    def settled(self) -> None:
        """Called when models, lanes and policy are final until the next change."""

    def ready(self) -> None:
        """Called when all models that load at the start are served."""

    def close(self, until_s: float) -> None:
        """Called when the server stops: end background work by `until_s` of the monotonic clock."""


class PlanView(Protocol):
    """Running plan, for status pages and metrics. Thread-safe."""

    def status(self) -> Mapping[str, Any]:
        """Plan, rates and attainment as JSON values."""

    def metrics(self) -> Iterator[Metric]:
        """Metric families for the metrics page."""


class OpenedPlan(Protocol):
    """Part of a plan file that this machine runs."""

    @property
    def lanes(self) -> PlanLanes:
        """Lanes with their duty-cycle rounds."""

    @property
    def shares_ns(self) -> Mapping[str, Mapping[str, int]]:
        """Stage budgets in nanoseconds, by application and stage."""


class PlanRun(Protocol):
    """Runner of a plan in a server; changes over to new plans. An observer of the server's driver."""

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """Observe an event."""

    def start(self) -> None:
        """Start, after the server has started."""

    def reload(self) -> None:
        """Schedule a reload of the plan file. Safe in a signal handler."""

    def stop(self, patience_s: float) -> None:
        """Stop changing plans; wait at most `patience_s` seconds for a running planner."""


class PlanFiles(Protocol):
    """Reader and runner of plan files. A package registers one by `registry.PLAN_FILES`."""

    def open(self, section: PlanSection, cores: Sequence[int], root: Path, *, stale: bool) -> OpenedPlan:
        """Read the file of `[plan]` and lay out its device on `cores`. Raises PlanError for an invalid plan,
        StaleProfileError unless `stale`."""

    def follow(self, server: Host, opened: OpenedPlan, section: PlanSection, *, stale: bool) -> PlanRun:
        """Create the runner of an opened plan in a server with the plan's lanes."""


def plan_files() -> PlanFiles:
    """The registered plan files. Raises ConfigError when no installed package serves plans."""
    found: PlanFiles | None = next(iter(registry.load_all(registry.PLAN_FILES).values()), None)
    if found is None:
        raise ConfigError("[plan]: no installed package serves plan files; install one, or remove the section")
    return found


def services_of(server: Host) -> Sequence[Service]:
    """One instance of every registered service."""
    return [kind(server) for kind in registry.load_all(registry.SERVICES).values()]
