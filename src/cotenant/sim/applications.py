"""Applications in the simulator: their queries become those of their stages, by the same state machine as in a server.

It differs from `serve.engine.flows` in that the next stage arrives at the very instant when the one before it ends.
Deadlines of stages follow from what the engine's predictor believes, or from a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from msgspec import structs

from cotenant.core.actions import Action, Respond
from cotenant.core.admission import most_cores
from cotenant.core.engine import Engine
from cotenant.core.events import ApplicationArrived, ApplicationEnded, Event, QueryArrived, QueryWithdrawn
from cotenant.core.flow import Finish, Flow, StageGraph, StartStage, Step
from cotenant.sim.driver import Log
from cotenant.types import Outcome, Query, StageQuery, Tenant


@dataclass(frozen=True, slots=True)
class SimulatedApplication:
    """An application and the tenants of its stages, in their order. `ends_ns` are the ends of a plan's shares, and
    `smallest` the numbers of the smallest shapes that the stages' models declare; empty where it is the first."""

    graph: StageGraph
    tenants: tuple[Tenant, ...]
    ends_ns: tuple[int, ...] | None = None
    smallest: tuple[int, ...] = ()

    def shape_of(self, stage: int, given: int) -> int:
        """The shape of a stage's query: that of the application's for a first stage, else the smallest."""
        return self.smallest_of(stage) if self.graph.after[stage] else given

    def smallest_of(self, stage: int) -> int:
        """The smallest shape that the model of a stage declares."""
        return self.smallest[stage] if self.smallest else 0


@dataclass(slots=True)
class _Run:
    """A query under way. `number` is what the engine knows it by, and `numbers` are those of its stages."""

    query: Query
    number: int
    application: SimulatedApplication
    flow: Flow
    deadlines_ns: Sequence[int]
    numbers: dict[int, int]


class StagedEngine:
    """An engine to which applications are tenants. For `simulate`, in place of the engine that it wraps.

    Of a stage's tensors nothing is known but the rows: the first stages have the shape of the query, later ones the
    smallest that their model declares, as a server believes before the tensors are there. `log` is told what the engine
    is told. As in a server one counter numbers all that comes to the engine; Respond actions have the numbers of the
    workload. `doubt` is asked, as in a server, when a stage was refused for what is believed of these tenants.
    """

    def __init__(
        self,
        engine: Engine,
        applications: Mapping[str, SimulatedApplication],
        log: Log | None = None,
        doubt: Callable[[Iterable[str]], Event | None] | None = None,
    ) -> None:
        self._engine = engine
        self.policy = engine.policy
        self._applications = applications
        self._widest = most_cores(engine.policy.spec)
        self._log = log
        self._doubt = doubt
        self._runs: dict[int, _Run] = {}
        self._stages: dict[int, tuple[_Run, int]] = {}
        self._numbers = count()
        self._plain: dict[int, int] = {}
        """The workload's numbers of the queries of no application, by the engine's."""

    @property
    def live(self) -> int:
        """Queries that have not ended, those of applications counted once beside their stages."""
        return self._engine.live + len(self._runs)

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """See Engine: the Respond actions are those of the workload's queries, applications included."""
        out: list[Action] = []
        todo: deque[Event] = deque()
        if type(event) is not QueryArrived:
            todo.append(event)
        elif event.query.tenant in self._applications:
            self._arrive(event.query, now_ns, todo, out)
        else:
            number = next(self._numbers)
            self._plain[number] = event.query.id
            todo.append(QueryArrived(structs.replace(event.query, id=number)))
        follows = False
        while todo:
            told = todo.popleft()
            if type(told) is QueryArrived:
                if not follows and self._is_over(told.query.id):
                    del self._stages[told.query.id]
                    continue
                follows = told.more
            actions = self._engine.handle(told, now_ns)
            if self._log is not None:
                self._log(now_ns, told, actions)
            for action in actions:
                if type(action) is Respond and action.query in self._stages:
                    run, stage = self._stages.pop(action.query)
                    if action.outcome is Outcome.REJECTED and (doubted := self._doubted(run, stage)) is not None:
                        todo.append(doubted)
                    steps = run.flow.stage_ended(stage, action.outcome, action.reason, now_ns)
                    self._follow(run, steps, now_ns, todo, out)
                elif type(action) is Respond:
                    out.append(structs.replace(action, query=self._plain.pop(action.query)))
                else:
                    out.append(action)
        return out

    def _is_over(self, number: int) -> bool:
        """Whether the application's query ended at the instant at which this stage of it was to start.

        Those that start together do so, whatever becomes of the first of them.
        """
        known = self._stages.get(number)
        return known is not None and known[0].flow.is_over

    def _arrive(self, query: Query, now_ns: int, todo: deque[Event], out: list[Action]) -> None:
        application = self._applications[query.tenant]
        graph = application.graph
        deadlines = graph.deadlines_ns(
            query.arrival_ns, query.deadline_ns, application.ends_ns, lambda: self._times(application, query)
        )
        run = _Run(query, next(self._numbers), application, Flow(graph, query.deadline_ns), deadlines, {})
        self._runs[run.number] = run
        todo.append(ApplicationArrived(run.number, query.tenant, query.arrival_ns, query.deadline_ns))
        self._follow(run, run.flow.begin(), now_ns, todo, out)

    def _follow(self, run: _Run, steps: Sequence[Step], now_ns: int, todo: deque[Event], out: list[Action]) -> None:
        starts = sum(isinstance(step, StartStage) for step in steps)
        for step in steps:
            match step:
                case StartStage():
                    starts -= 1
                    todo.append(QueryArrived(self._stage_query(run, step.stage, now_ns), more=starts > 0))
                case Finish():
                    query = run.query
                    del self._runs[run.number]
                    todo.append(ApplicationEnded(run.number, step.outcome, step.reason, now_ns))
                    out.append(Respond(query.id, step.outcome, step.reason))
                case _:
                    todo.append(QueryWithdrawn(run.numbers[step.stage], f"withdrawn: {step.reason}"))

    def _stage_query(self, run: _Run, stage: int, now_ns: int) -> StageQuery:
        query, tenant = run.query, run.application.tenants[stage]
        shape = run.application.shape_of(stage, query.shape)
        number = run.numbers[stage] = next(self._numbers)
        self._stages[number] = run, stage
        return StageQuery(
            number,
            tenant.name,
            now_ns,
            run.deadlines_ns[stage],
            query.rank,
            query.items,
            shape,
            shape,
            query.expiry_ns,
            run.number,
            run.application.graph.names[stage],
        )

    def _doubted(self, run: _Run, stage: int) -> Event | None:
        """A stage was refused: if that was for what is believed of its models, they are believed to be quicker."""
        application, query = run.application, run.query
        if self._doubt is None:
            return None
        times = self._alone_ns(
            application, query.items, [*map(application.smallest_of, range(len(application.tenants)))]
        )
        limit_ns = query.deadline_ns - query.arrival_ns
        is_slow = application.graph.is_too_long(stage, times, limit_ns, application.ends_ns)
        return self._doubt([tenant.name for tenant in application.tenants]) if is_slow else None

    def _times(self, application: SimulatedApplication, query: Query) -> list[int]:
        """The predicted latency of each stage alone."""
        shapes = [application.shape_of(stage, query.shape) for stage in range(len(application.tenants))]
        return self._alone_ns(application, query.items, shapes)

    def _alone_ns(self, application: SimulatedApplication, items: int, shapes: Sequence[int]) -> list[int]:
        return [
            self._engine.predictor.latency_ns(tenant.work(shape, items), self._widest)
            for tenant, shape in zip(application.tenants, shapes, strict=True)
        ]
