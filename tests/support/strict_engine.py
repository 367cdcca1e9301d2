"""An engine for tests of policies: a fault of the policy is raised, where a server lets the fallback decide."""

from __future__ import annotations

from typing import NoReturn

from cotenant.core.engine import Engine


class StrictEngine(Engine):
    """Raises ProtocolViolationError from `handle` for a decision that breaks the contract, and what a policy raises.

    Nothing of such a decision is booked.
    """

    def _blame(self, name: str, call: str, error: Exception, query: int = -1) -> NoReturn:
        raise error
