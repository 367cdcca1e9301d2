"""Several tenants in one partition, in groups or in turn: the largest rates that plans serve, on simulated A100s.

Not in the paper. Sets of two, three and four tenants are drawn for one device of the released networks, and of six for
two. Each tenant has a model of its own, and the largest QoS target that the paper gives to a pair of the set. Its rate
is drawn as a share of the device. The planner `ours` finds the largest multiple of all rates that it can plan (to 1 %).
It does so once with groups among its costs and once without. Without groups the slots of a round run in turn. Batches
are the measured ones, in both. Groups are of two models, and of three where the network for three was fitted for them.
Sets without any plan in turn do not count in the mean.

Each plan is written to a plan file, read again and checked there (`checked_violations`). Then both plans are simulated
(`simulate_plan`), each with Poisson arrivals of single rows at its own rates. A plan without headroom is full, so that
some rows are late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean, geometric_mean

from msgspec.structs import replace
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.papers.abacus._a100 import A100, NS_PER_MS, targets_ms
from bench.papers.abacus._group_costs import DEVICE, NetworkCosts, latency_ns
from cotenant.techniques.partitions.plan.assess import violations
from cotenant.techniques.partitions.plan.file import PlanFile, Request, parse_plan, plan_text
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.table_costs import WithoutGroups
from cotenant.techniques.partitions.plan.types import Costs, Load, Plan
from cotenant.techniques.partitions.world import simulate_plan
from cotenant.work import Work

NAME = "partition-overlap"
SETS, QUICK_SETS = ((2, 1, 12), (3, 1, 12), (4, 1, 6), (6, 2, 6)), ((2, 1, 4), (3, 1, 4), (6, 2, 1))
"""Tenants, devices, and how many such sets are drawn."""
ROWS, QUICK_ROWS = 20_000, 3_000
"""Arrive in a simulation."""
MOST_MEMBERS = 3
"""Of a group: there is no network for four on the whole device."""
STEP = 1.01
SHARES = 0.5, 2.0
"""Of the device that a tenant takes, before they are scaled."""
SEED = 1
PLANNER = Optimal(time_limit_s=0.5, saving_s=0.0, most_slots=4)


@dataclass(frozen=True, slots=True)
class _Best:
    """The largest multiple of the rates that was planned (0 for none), the loads at it, and the plan."""

    factor: float
    loads: tuple[Load, ...]
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class _Found:
    """The plans of a set; rates are rows a second of all tenants.

    `worst` are the shares of the tenant with the fewest answers in time, when both plans are simulated.
    """

    models: tuple[str, ...]
    devices: int
    slo_ms: float
    in_turn_per_s: float
    grouped_per_s: float
    groups: tuple[str, ...]
    violations: tuple[str, ...]
    in_turn_attainment: float
    in_turn_worst: float
    grouped_attainment: float
    grouped_worst: float

    @property
    def gain(self) -> float:
        """With groups over without; infinite where nothing could be planned in turn."""
        return self.grouped_per_s / self.in_turn_per_s if self.in_turn_per_s > 0 else math.inf


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Plan, check, simulate, print the table, return figures."""
    console = Console(width=150)
    world = A100(data_dir)
    names = [model.name for model in world.models]
    targets = targets_ms(data_dir, "2in7")
    costs = NetworkCosts(world, names, MOST_MEMBERS)
    random = Random(SEED)
    drawn = [(count, devices) for count, devices, sets in (QUICK_SETS if quick else SETS) for _ in range(sets)]
    found = []
    for count, devices in track(drawn, "sets", console=console):
        models = tuple(sorted(random.sample(names, count), key=names.index))
        slo_ms = max(targets[pair] for pair in combinations(models, 2))
        full = {name: 32e9 / latency_ns(world, ((name, 32),)) for name in models}
        slo_ns = round(slo_ms * NS_PER_MS)
        loads = [Load(name, name, random.uniform(*SHARES) * full[name], slo_ns) for name in models]
        found.append(_compared(costs, loads, devices, QUICK_ROWS if quick else ROWS))
    console.print(_table(found))
    if quick:
        console.print("quick: nine sets, shorter simulations")
    return {"summary": _summary(found), "rows": [asdict(each) for each in found], "seeds": [SEED]}


def _compared(costs: NetworkCosts, loads: Sequence[Load], devices: int, rows: int) -> _Found:
    grouped, in_turn = largest(costs, loads, devices), largest(WithoutGroups(costs), loads, devices)
    wrong = tuple(sentence for best in (grouped, in_turn) for sentence in _checked(best, costs, devices))
    total = sum(load.rate_per_s for load in loads)
    return _Found(
        tuple(load.model for load in loads),
        devices,
        loads[0].slo_ns / NS_PER_MS,
        in_turn.factor * total,
        grouped.factor * total,
        tuple(_groups(grouped.plan) if grouped.plan else ()),
        wrong,
        *_attained(in_turn, costs, rows),
        *_attained(grouped, costs, rows),
    )


def largest(costs: Costs, loads: Sequence[Load], devices: int) -> _Best:
    """The largest multiple of the loads' rates that the planner serves on so many devices, to a factor of STEP."""
    full = sum(load.rate_per_s * _least_ns_per_row(costs, load.model) / 1e9 for load in loads)
    low, high = _Best(0.0, tuple(loads), None), len(loads) * devices / full  # as if all could overlap at no cost
    least = high / 4096
    while high / max(low.factor, least) > STEP:
        factor = math.sqrt(max(low.factor, least) * high)
        asked = tuple(replace(load, rate_per_s=load.rate_per_s * factor) for load in loads)
        plan = PLANNER.plan(asked, [DEVICE] * devices, costs)
        if isinstance(plan, Plan):
            low = _Best(factor, asked, plan)
        else:
            high = factor
    return low


def _least_ns_per_row(costs: Costs, model: str) -> float:
    return min(
        costs.latency_ns(Work(model, 0, batch), DEVICE.whole, DEVICE.name) / batch for batch in costs.batches(model)
    )


def _checked(best: _Best, costs: Costs, devices: int) -> tuple[str, ...]:
    """What is wrong with a plan when its file is read again: with groups and in turn by the same costs."""
    if best.plan is None:
        return ()
    request = Request(best.loads, (DEVICE,) * devices)
    read = parse_plan(plan_text(PlanFile(request, best.plan, 0.0)), "the plan")
    return violations(read.plan, read.request.loads, read.request.devices, costs)


def _attained(best: _Best, costs: Costs, rows: int) -> tuple[float, float]:
    """Answered in time, as a share of all and of the tenant with the least share; 0 without a plan."""
    if best.plan is None:
        return 0.0, 0.0
    seconds = rows / sum(load.rate_per_s for load in best.loads)
    done = simulate_plan(best.plan, best.loads, costs, duration_s=seconds, seed=SEED)
    shares = [each.answered / max(1, each.offered) for each in done.tenants]
    offered = sum(each.offered for each in done.tenants)
    return sum(each.answered for each in done.tenants) / max(1, offered), min(shares)


def _groups(plan: Plan) -> list[str]:
    """The groups of a plan in words, as bert 32 + vgg16 4."""
    steps = [step for device in plan.devices for partition in device.partitions for step in partition.round.steps]
    return [" + ".join(f"{slot.tenant} {slot.batch}" for slot in step) for step in steps if len(step) > 1]


def _table(found: Sequence[_Found]) -> Table:
    table = Table(title="Rows a second that can be planned, and their share that is answered in time when simulated")
    for column in (
        "models",
        "devices",
        "SLO",
        "in turn",
        "with groups",
        "gain",
        "in time",
        "in time, groups",
        "groups",
    ):
        table.add_column(column, justify="left" if column in ("models", "groups") else "right")
    for each in found:
        table.add_row(
            " ".join(each.models),
            str(each.devices),
            f"{each.slo_ms:.0f} ms",
            f"{each.in_turn_per_s:.0f}",
            f"{each.grouped_per_s:.0f}",
            f"{each.gain:.2f}x" if each.in_turn_per_s or each.grouped_per_s else "none",
            f"{100 * each.in_turn_attainment:.1f} %",
            f"{100 * each.grouped_attainment:.1f} %",
            ", ".join(each.groups),
        )
    return table


def _summary(found: Sequence[_Found]) -> dict[str, float]:
    both = [each for each in found if each.in_turn_per_s > 0]
    gains = [each.gain for each in both]
    return {
        "rate_over_time_sharing_geomean": geometric_mean(gains),
        "rate_over_time_sharing_worst": min(gains),
        "checked_violations": sum(len(each.violations) for each in found),
        "sets": len(found),
        "sets_with_groups": sum(bool(each.groups) for each in found),
        "sets_only_with_groups": sum(each.in_turn_per_s == 0 < each.grouped_per_s for each in found),
        "attainment_grouped": fmean(each.grouped_attainment for each in both),
        "attainment_in_turn": fmean(each.in_turn_attainment for each in both),
    }
