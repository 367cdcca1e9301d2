"""Applications in virtual time: a driver with one tenant a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.actions import Action
from cotenant.core.events import Event, QueryArrived
from cotenant.core.flow import StageGraph
from cotenant.core.snapshot import DropRule, Policy
from cotenant.execute.protocol import Timing
from cotenant.policies import policy_class
from cotenant.predict.online import OnlineModel
from cotenant.repository.application_spec import ApplicationSpec, Source, StageSpec
from cotenant.serve.engine.clock import VirtualClock
from cotenant.serve.engine.counters import Counters
from cotenant.serve.engine.driver import Driver
from cotenant.serve.engine.flows import Flows
from cotenant.serve.models.served_application import ServedApplication, fit
from cotenant.serve.models.served_models import QueryForm
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, Wait
from cotenant.trace import TraceWriter, header
from cotenant.types import Outcome, StageQuery, Tenant
from cotenant.wire.api import InferRequest, InferResult, ModelMetadata, ServeError, Status, TensorSpec
from cotenant.work import Machine, Share
from cotenant.world.simulated import SimulatedExecutor, TableWorld
from scenario import CORES, MS, ONE_LANE, tables
from strict_engine import StrictEngine as Engine

X = {"x": np.zeros((1, 2), np.float32)}
SPEC = TensorSpec("x", "FP32", (-1, 2))


class FakeModel:
    """As much of a served model as applications look at; the simulated executor gives `x` back as `x`."""

    smallest_shape = 0
    is_over = False

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.metadata = ModelMetadata(tenant.name, ("1",), "fake", (SPEC,), (SPEC,), tenant.max_batch)

    def form(self, request: InferRequest) -> QueryForm:
        return QueryForm(len(request.inputs["x"]), 0, 0)

    def still_served(self) -> Tenant:
        if self.is_over:
            raise ServeError(Status.UNAVAILABLE, "it was reloaded")
        return self.tenant


def application(slo_ms: float, after: Sequence[Sequence[int]], outputs: Sequence[int] = ()) -> ApplicationSpec:
    """Stages s0, s1, ... of models m0, m1, ...; each takes the output of the first that it needs."""
    count = len(after)
    stages = tuple(
        StageSpec(f"s{at}", f"m{at}", {"x": Source(needed[0], "x") if needed else Source(None, "x")})
        for at, needed in enumerate(after)
    )
    graph = StageGraph(tuple(stage.name for stage in stages), tuple(tuple(needed) for needed in after))
    last = outputs or [at for at in range(count) if not any(at in needed for needed in after)]
    return ApplicationSpec(
        "app", Path("app"), round(slo_ms * MS), 0, stages, {f"y{at}": Source(at, "x") for at in last}, graph
    )


PLANS = (
    JointPlan(
        (JointMember("m0", 1, 1, rank=1), JointMember("m1", 1, 1), JointMember("m2", 1, 1)), waits=(Wait(2, 0, 1, 1),)
    ),
    JointPlan((JointMember("m1", 2, 1), JointMember("m2", 2, 1)), ((1, 0),), (), (Chunk(0, 0, 1, (1, 1)),)),
)
"""For models that are there together."""


def with_plans(policy: str, lanes: tuple[Share, ...], drop: DropRule) -> Policy:
    """A policy by its name; one that follows joint plans has some."""
    made: Policy = policy_class(policy)(lanes, drop)
    return replace(made, joint_plans=PLANS) if hasattr(made, "joint_plans") else made  # type: ignore[type-var]


class World:
    """A driver in virtual time with one tenant a stage. `times_ms` are predicted latencies, `real_ms` the real ones."""

    def __init__(
        self,
        spec: ApplicationSpec,
        times_ms: Sequence[float],
        *,
        real_ms: Sequence[float] = (),
        drop: DropRule = DropRule.HOPELESS,
        lanes: tuple[Share, ...] = ONE_LANE,
        shares_ms: Mapping[str, float] | None = None,
        max_batch: int = 1,
        batch_slope: float | None = None,
        trace: Path | None = None,
        policy: str = "edf",
        **world: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.seen: list[tuple[int, Event, list[Action]]] = []
        self.results: list[tuple[int, InferResult]] = []
        tenants = [Tenant(f"m{at}", 10_000 * MS, max_batch=max_batch, splits=((0, 1),)) for at in range(len(times_ms))]
        believed, real = (
            tables({f"m{at}": round(time * MS) for at, time in enumerate(times)}, batch_slope=batch_slope)
            for times in (times_ms, real_ms or times_ms)
        )
        self.beliefs = OnlineModel(max(lane.size for lane in lanes), adapt=False)
        for tenant in tenants:
            self.beliefs.add(tenant.name, believed.tables[tenant.name])
        self.counters = Counters()
        for tenant in tenants:
            self.counters.add(tenant.name, tenant.slo_ns)
        self.counters.add("app", spec.slo_ns)
        made = with_plans(policy, lanes, drop)
        self.engine = Engine(tenants, made, self.beliefs.predictor, Machine.cpu(CORES))
        self.executor = SimulatedExecutor(TableWorld(real, **world), self.clock)
        self.writer = None
        if trace is not None:
            head = header(made, self.beliefs.predictor, tenants, Machine.cpu(CORES), created="")
            self.writer = TraceWriter(trace.open("wb"), head)
        self.driver = Driver(self.engine, self.executor, self.clock, (self.counters, self.beliefs, self._watch))
        self.models = {tenant.name: FakeModel(tenant) for tenant in tenants}
        self.flows = Flows(lambda: self.driver, self.clock, self.counters, self.beliefs, self.find)  # type: ignore[arg-type]
        shares = None if shares_ms is None else {name: round(share * MS) for name, share in shares_ms.items()}
        self.app: ServedApplication = fit(spec, self.find, shares)  # type: ignore[arg-type]

    def find(self, name: str) -> FakeModel:
        if name not in self.models:
            raise ServeError(Status.UNAVAILABLE, f"model {name!r} is not served: it was unloaded")
        return self.models[name]

    def _watch(self, now: int, event: Event, actions: list[Action], _: Timing | None) -> None:
        self.seen.append((now, event, actions))
        if self.writer is not None:
            self.writer(now, event, actions)

    def done(self, result: InferResult) -> None:
        self.results.append((self.clock.now_ns(), result))

    def ask(self, **more: Any) -> int:
        return self.flows.submit(self.app, InferRequest("app", X, **more), self.done)

    def at(self, time_ms: float, act: Any) -> None:
        self.clock.call_at(round(time_ms * MS), 2, lambda: act() and None)

    def run(self) -> None:
        """Let everything happen; whatever it was, nothing is left."""
        self.clock.run()
        assert self.flows.under_way == 0
        assert self.flows.wait_idle(0)
        assert self.driver.wait_idle(0)
        assert self.executor.kept == 0
        counted = self.counters.by_tenant["app"]
        assert sum(counted.outcomes.values()) == counted.arrived == len(self.results)
        if self.writer is not None:
            self.writer.close()

    def events(self, kind: type) -> list[Any]:
        return [event for _, event, _ in self.seen if isinstance(event, kind)]

    @property
    def stages(self) -> list[StageQuery]:
        return [event.query for event in self.events(QueryArrived)]

    @property
    def story(self) -> list[tuple[float, Outcome, str]]:
        return [(now / MS, result.outcome, result.reason) for now, result in self.results]


CHAIN = [[], [0], [1]]
DIAMOND = [[], [0], [0], [1, 2]]
