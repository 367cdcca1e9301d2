"""A policy that fails in a replay where it failed in the recorded run."""

from __future__ import annotations

from cotenant.core.actions import PolicyFault
from cotenant.core.faults import DECIDE, QUEUE_KEY
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, Policy, PolicySpec, Snapshot
from cotenant.errors import ProtocolViolationError
from cotenant.types import Query, Tenant


class RecordedPolicy:
    """A policy that fails where it failed in a recorded run, whether it would now or not: there it is not asked."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.faults: list[PolicyFault] = []
        """Those of the present event."""

    @property
    def spec(self) -> PolicySpec:
        """That of the policy."""
        return self._policy.spec

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        """See Policy."""
        self._fail(QUEUE_KEY, query.id)
        return self._policy.queue_key(query, tenant, predictor)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """See Policy."""
        self._fail(DECIDE, -1)
        return self._policy.decide(snapshot, memory)

    def _fail(self, call: str, query: int) -> None:
        for fault in self.faults:
            if (fault.policy, fault.call, fault.query) == (self._policy.spec.name, call, query):
                raise ProtocolViolationError(fault.reason)
