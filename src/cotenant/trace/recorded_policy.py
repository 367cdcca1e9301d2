"""Policy wrapper for replays: fails where the policy failed in the recorded run."""

from __future__ import annotations

from typing_extensions import override

from cotenant.core.actions import PolicyFault
from cotenant.core.faults import DECIDE, QUEUE_KEY
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, Policy, PolicySpec, Snapshot
from cotenant.errors import ProtocolViolationError
from cotenant.types import Query, Tenant


class RecordedPolicy(Policy):
    """A policy that raises the recorded faults of an event instead of calling the wrapped policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.faults: list[PolicyFault] = []
        """Recorded faults of the present event."""

    @property
    @override
    def spec(self) -> PolicySpec:
        return self._policy.spec

    @override
    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        self._fail(QUEUE_KEY, query.id)
        return self._policy.queue_key(query, tenant, predictor)

    @override
    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        self._fail(DECIDE, -1)
        return self._policy.decide(snapshot, memory)

    def _fail(self, call: str, query: int) -> None:
        for fault in self.faults:
            if (fault.policy, fault.call, fault.query) == (self._policy.spec.name, call, query):
                raise ProtocolViolationError(fault.reason)
