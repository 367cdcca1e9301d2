"""Applications in the simulator: their queries become queries of their stages, by the server's state machine.

Unlike in `serve.engine.flows`, a stage arrives at the instant at which its last predecessor ends. Deadlines of stages
come from the predictor of the engine, or from a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple

from msgspec import structs

from cotenant.core.actions import Action, Respond
from cotenant.core.admission import most_cores
from cotenant.core.engine import Engine
from cotenant.core.events import ApplicationEnded, Event, QueryArrived
from cotenant.core.flow import AloneNs, Flow, FlowProbes, StageGraph, StartStages
from cotenant.sim.driver import Log
from cotenant.types import Outcome, Query, Tenant


class SimulatedApplication(NamedTuple):
    """An application, and the tenants of its stages in their order."""

    graph: StageGraph
    tenants: tuple[Tenant, ...]


class StagedEngine:
    """Wraps an engine for `simulate`, so that applications look like tenants.

    Only the rows of a stage's tensors are known. First stages have the shape of the query, later ones the smallest
    declared shape of their model, as a server predicts before the tensors exist. `log` gets the events of the wrapped
    engine, which numbers queries with one counter, as in a server. Respond actions have the ids of the workload.
    """

    def __init__(
        self,
        engine: Engine,
        applications: Mapping[str, SimulatedApplication],
        log: Log | None = None,
    ) -> None:
        self._engine = engine
        self.policy = engine.policy
        self._applications = applications
        self._widest = most_cores(engine.policy.spec)
        self._log = log
        self._probes = FlowProbes()
        self._flows: dict[int, Flow] = {}
        self._stages: dict[int, tuple[Flow, int]] = {}
        self._numbers = count()
        self._given: dict[int, int] = {}
        """Ids of queries in the workload, by id in the engine."""

    @property
    def live(self) -> int:
        """Number of queries that have not ended; those of applications count in addition to their stages."""
        return self._engine.live + len(self._flows)

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Handle an event; return actions, with the Respond actions of the workload's queries."""
        out: list[Action] = []
        todo = deque(self._arrive(event.query) if type(event) is QueryArrived else [event])
        while todo:
            step = todo.popleft()
            for each in self._start(step, now_ns) if isinstance(step, StartStages) else (step,):
                actions = self._engine.handle(each, now_ns)
                if self._log is not None:
                    self._log(now_ns, each, actions)
                for action in actions:
                    if type(action) is not Respond:
                        out.append(action)
                    elif action.query in self._stages:
                        todo += self._stage_ended(action, now_ns, out)
                    else:
                        out.append(structs.replace(action, query=self._given.pop(action.query)))
        return out

    def _arrive(self, query: Query) -> list[Event | StartStages]:
        number = next(self._numbers)
        self._given[number] = query.id
        query = structs.replace(query, id=number)
        application = self._applications.get(query.tenant)
        if application is None:
            return [QueryArrived(query)]
        graph = application.graph
        known = {stage: (query.shape, query.items) for stage, needed in enumerate(graph.after) if not needed}
        flow = self._flows[number] = Flow(graph, query, self._alone_ns(application), known)
        self._probes.admit(flow, self._alone_ns(application), query.arrival_ns)
        return [flow.arrived, *flow.begin()]

    def _start(self, step: StartStages, now_ns: int) -> list[Event]:
        """Arrivals of stages that start together; none if their query ended at the same instant."""
        arrivals: list[Event] = []
        flow = self._flows.get(step.query)
        if flow is None:
            return arrivals
        for stage in step.stages:
            number = next(self._numbers)
            self._stages[number] = flow, stage
            tenant, (shape, items) = self._applications[flow.query.tenant].tenants[stage], flow.works[stage]
            query = flow.stage_query(stage, number, tenant.name, now_ns, items, shape, shape)
            arrivals.append(QueryArrived(query, more=stage != step.stages[-1]))
        return arrivals

    def _stage_ended(self, respond: Respond, now_ns: int, out: list[Action]) -> list[Event | StartStages]:
        flow, stage = self._stages.pop(respond.query)
        steps = flow.stage_ended(stage, respond.outcome, respond.reason, now_ns)
        for step in steps:
            if type(step) is ApplicationEnded:
                self._probes.ended(flow, step.outcome, now_ns)
                del self._flows[step.query]
                out.append(Respond(self._given.pop(step.query), step.outcome, step.reason))
        if respond.outcome is Outcome.REJECTED:
            self._probes.refused(flow)
        return [*steps]

    def _alone_ns(self, application: SimulatedApplication) -> AloneNs:
        predictor = self._engine.predictor
        return lambda stage, shape, items: predictor.latency_ns(
            application.tenants[stage].work(shape, items), self._widest
        )
