"""Admission gates: which tenants refuse every query now, readable by front-ends without the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cotenant.core.actions import Action
from cotenant.core.admission import OPEN, Gate
from cotenant.core.engine import Engine
from cotenant.core.events import DrainStarted, Event, QueryArrived, TenantSuspended
from cotenant.execute.protocol import Timing


class Gates:
    """Shut gates by tenant. An observer of the driver.

    Entries are replaced as a whole, so readers on any thread need no lock. A reader may see the state before the last
    event; the engine checks every query again. `on_change` is called when an entry has changed.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._on_change = on_change
        self._shut: dict[str, Gate] = {}

    @property
    def shut(self) -> Mapping[str, Gate]:
        """Shut gates by tenant; a tenant without an entry has an open gate."""
        return self._shut

    def __call__(self, time_ns: int, event: Event, actions: Sequence[Action], timing: Timing | None) -> None:
        """Update the gate of the event's tenant, and all shut gates."""
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
