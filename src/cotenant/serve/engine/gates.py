"""What front-ends may know of tenants before a query has come: which take none now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cotenant.core.actions import Action
from cotenant.core.admission import OPEN, Gate
from cotenant.core.engine import Engine
from cotenant.core.events import DrainStarted, Event, QueryArrived, TenantSuspended
from cotenant.execute.protocol import Timing


class Gates:
    """The gates of the tenants that are not open. Observes the driver.

    Entries are replaced as a whole, so that readers on any thread need no lock. What a reader sees may be out of date
    by an event: the engine judges what it is given all the same. `on_change` is called when an entry has changed.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._on_change = on_change
        self._shut: dict[str, Gate] = {}

    @property
    def shut(self) -> Mapping[str, Gate]:
        """By tenant; one that is not there is open."""
        return self._shut

    def __call__(self, time_ns: int, event: Event, actions: Sequence[Action], timing: Timing | None) -> None:
        """Look again at the tenant of a query or worker, and at the gates that were shut."""
        if type(event) is QueryArrived:
            self._look(event.query.tenant, time_ns)
        elif type(event) is TenantSuspended:
            self._look(event.tenant, time_ns)
        elif type(event) is DrainStarted:
            for tenant in self._engine.tenants:
                self._look(tenant.name, time_ns)
        if self._shut:
            for name in list(self._shut):
                self._look(name, time_ns)

    def _look(self, tenant: str, time_ns: int) -> None:
        gate = self._engine.gate(tenant, time_ns)
        if gate is OPEN:
            if self._shut.pop(tenant, None) is not None:
                self._on_change()
        elif self._shut.get(tenant) != gate:
            self._shut[tenant] = gate
            self._on_change()
