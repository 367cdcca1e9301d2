"""Services: what a package adds to a server, called by the server at fixed moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client.core import Metric

from cotenant import registry
from cotenant.core.snapshot import Policy

if TYPE_CHECKING:
    from cotenant.measure.load_spec import VersionFacts
    from cotenant.serve.models.served_models import ServedModel
    from cotenant.serve.server import Server


class Service:
    """Base of services: each hook does nothing unless a subclass overrides it. One object serves one server.

    All hooks but `added` and `close` are called under the server's lock of loading, on the thread that loads. A package
    joins by an entry point of the group `registry.SERVICES` that names a subclass.
    """

    def __init__(self, server: Server) -> None:
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


def services_of(server: Server) -> Sequence[Service]:
    """One object of every registered service."""
    return [kind(server) for kind in registry.load_all(registry.SERVICES).values()]
