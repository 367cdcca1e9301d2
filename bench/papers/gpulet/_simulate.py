"""Simulation of a plan with real arrivals: an event simulation of rounds, much quicker than that of the whole core.

The runtime is that of the duty-cycle policy. Each partition runs its slots in turn, at most the planned batch of each.
It skips slots without waiting rows, and starts the next slot as soon as the last one has ended. Rows are handed to
devices in turn, in proportion to the rates planned there. A front end does so without knowing how long their queues
are. Within a device one queue feeds all slots of a tenant.

Pure: the same arguments give the same answers. Left out are the time of decisions and of the network. Also left out are
changes of interference in the middle of a batch: its slowdown is that of the neighbours that run when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bench.papers.gpulet._arrivals import Times, poisson_arrivals
from bench.papers.gpulet._sim_lanes import NEVER, Lanes
from bench.papers.gpulet._sim_outcomes import Answers, PartitionUse, PlanChange, Simulated, TenantOutcome
from bench.papers.gpulet._sim_world import World
from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan.application import Application
from cotenant.techniques.partitions.plan.types import NS_PER_S, Costs, DeviceType, Load, Plan, checked

__all__ = ["Answers", "PartitionUse", "PlanChange", "Simulated", "TenantOutcome", "simulate_plan"]

_CHUNK_NS = 30 * NS_PER_S
"""Arrivals are handed out for so long at a time, to keep memory small."""


def simulate_plan(
    plan: Plan,
    loads: Sequence[Load],
    devices: Sequence[DeviceType],
    costs: Costs,
    *,
    arrivals: Mapping[str, Times] | None = None,
    duration_ns: int = 60 * NS_PER_S,
    warmup_ns: int = 0,
    seed: int = 0,
    applications: Sequence[Application] = (),
    actual: Costs | None = None,
    noise: float = 0.0,
    is_dropping: bool = True,
    changes: Sequence[PlanChange] = (),
) -> Simulated:
    """Run a plan and give the outcomes of the queries.

    `arrivals` are ascending times in ns by tenant, and by application for those; without them they are drawn, Poisson
    at the rates given, for `duration_ns`. Those before `warmup_ns` are served but not counted. `loads` include those of
    the stages of `applications`; a query of an application is answered when all its stages are.

    `costs` are the predictions of the runtime. With `is_dropping`, rows that would be late in their slot, by its time
    alone, are dropped. `actual` (default: the same) are the real costs. A batch takes its latency, times its factor
    beside the launches in the other partitions, times noise. Noise is lognormal with median 1; `noise` is the spread of
    its logarithm. A tenant without a slot has all its queries dropped.

    Raises PlanError for slots without a load, devices of unknown type and plans that `checked` refuses. Raises the
    errors of the costs, and InvalidValueError for other values out of range.
    """
    types = checked(loads, devices)
    if noise < 0:
        raise InvalidValueError("simulation", "noise", noise, "a spread from 0")
    known = {load.tenant: load for load in loads}
    staged = {app.tenant(stage): (app, stage) for app in applications for stage in app.stages}
    for tenant in staged:
        if tenant not in known:
            raise PlanError(f"stage {tenant!r} of an application has no load")
    if arrivals is None:
        rates = {load.tenant: load.rate_per_s for load in loads if load.tenant not in staged}
        rates |= {app.name: app.rate_per_s for app in applications}
        arrivals = poisson_arrivals(rates, duration_ns, seed)
    drawn = noise_factors(noise, seed) if noise else None
    lanes = Lanes(actual or costs, drawn, is_dropping)
    world = World(lanes, known, types, costs, actual or costs, staged, arrivals)
    at = sorted([PlanChange(0, plan), *changes], key=lambda change: change.at_ns)
    last = max((int(times[-1]) for times in arrivals.values() if len(times)), default=0) + 1
    for number, change in enumerate(at):
        end = at[number + 1].at_ns if number + 1 < len(at) else max(last, change.at_ns + 1)
        world.change(change)
        for start in range(change.at_ns, end, _CHUNK_NS):
            world.hand_out(start, min(end, start + _CHUNK_NS))
            lanes.run(min(end, start + _CHUNK_NS))
    lanes.run(NEVER)
    return world.result(loads, applications, warmup_ns)


def noise_factors(spread: float, seed: int) -> Iterator[float]:
    """Lognormal factors of median 1, without end; `spread` is that of their logarithm."""
    rng = np.random.default_rng([seed, 1])
    while True:
        yield from np.exp(spread * rng.standard_normal(4096)).tolist()
