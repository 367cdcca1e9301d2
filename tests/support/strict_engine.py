"""An engine for tests of policies: a fault of the policy is raised, where a server lets the fallback decide."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from cotenant.core.engine import Engine
from cotenant.core.faults import PolicyGuard
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Policy
from cotenant.types import Tenant
from cotenant.work import Machine


class _StrictGuard(PolicyGuard):
    def _blame(self, name: str, call: str, error: Exception, query: int = -1) -> NoReturn:
        raise error


class StrictEngine(Engine):
    """Raises ProtocolViolationError from `handle` for a decision that breaks the contract, and what a policy raises.

    Nothing of such a decision is booked.
    """

    def __init__(self, tenants: Iterable[Tenant], policy: Policy, predictor: Predictor, machine: Machine) -> None:
        super().__init__(tenants, policy, predictor, machine)
        self.guard.__class__ = _StrictGuard
