"""The same arrivals in the product: its engine and policies against the many-core world."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.papers.veltair._loop import ANSWERED, DROPPED, LATE, REJECTED
from bench.papers.veltair._play import Arrivals
from bench.papers.veltair._worlds import CORES, Truth
from cotenant.core.actions import Respond
from cotenant.core.engine import Engine
from cotenant.core.predictor import Spans
from cotenant.core.snapshot import Decision, Policy, Snapshot
from cotenant.sim.driver import simulate
from cotenant.techniques.layer_blocks.world.many_core import ManyCore, ManyCoreWorld
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import CPU, Machine, Work

_OUTCOMES = {
    Outcome.ANSWERED: ANSWERED,
    Outcome.LATE: LATE,
    Outcome.REJECTED: REJECTED,
    Outcome.DROPPED: DROPPED,
}


class Beliefs:
    """The predictions of policies for a world: a BlockPredictor."""

    beside = 0.0

    def __init__(self, truths: Sequence[Truth], bandwidth_bytes_per_s: int) -> None:
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._spans = {truth.model.name: truth.believed.spans() for truth in truths}

    def spans(self, tenant: str, shape: int, items: int) -> Spans:
        return self._spans[tenant]

    def latency_ns(self, work: Work, size: int, device: str = CPU) -> int:
        spans = self._spans[work.tenant]
        return spans.block_ns(work.start, work.end or spans.units, 0, 0, size)

    def upper_ns(self, tenant: str, latency_ns: int, slo_ns: int) -> int:
        return latency_ns


class Timed:
    """A policy with timed decisions, in processor time: neighbours on the cores are not its own."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.spec, self.queue_key = policy.spec, policy.queue_key
        self.taken_ns: list[int] = []

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        began = time.thread_time_ns()
        made = self._policy.decide(snapshot, memory)
        self.taken_ns.append(time.thread_time_ns() - began)
        return made


def play_product(
    truths: Sequence[Truth], beliefs: Beliefs, policy: Policy, given: Arrivals, machine: ManyCore
) -> tuple[int, list[int], list[int]]:
    """Play arrivals; gives the time of the last event, and the end and outcome of each query."""
    tenants = [
        Tenant(each.model.name, each.model.qos_ns, tuple(range(len(each.real.units) + 1)), max_queue=10_000)
        for each in truths
    ]
    engine = Engine(tenants, policy, beliefs, Machine.cpu(range(CORES)))
    world = ManyCoreWorld({each.model.name: each.real for each in truths}, machine)
    queries = [
        Query(number, tenants[who].name, int(at), int(at) + tenants[who].slo_ns)
        for number, (at, who) in enumerate(zip(given.times, given.who, strict=True))
    ]
    ends, outcomes = [0] * len(queries), [0] * len(queries)

    def on_respond(action: Respond, now_ns: int) -> None:
        ends[action.query], outcomes[action.query] = now_ns, _OUTCOMES[action.outcome]

    return simulate(engine, world, queries, on_respond), ends, outcomes
