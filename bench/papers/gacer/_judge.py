"""Judgement of plans of a set in a world: found on predicted costs, played on the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.papers.gacer._joint_run import JointWorld
from bench.papers.gacer._kernel_world import SLOTS, KernelCosts, KernelDevice
from bench.papers.gacer._sets import JointSet
from bench.papers.gacer._worlds import Drawn
from cotenant.techniques.granularity.joint_plan import JointPlan
from cotenant.techniques.granularity.kernel_table import Column, KernelTable
from cotenant.techniques.granularity.plan.joint_bound import bound_of
from cotenant.techniques.granularity.plan.joint_search import JointSearch
from cotenant.techniques.granularity.plan.published import Published
from cotenant.techniques.granularity.predict.rules import Admission, Issuing, Occupancy
from cotenant.techniques.layer_blocks.world.many_core_rules import FULL

TIME_ERROR, NEED_ERROR = 0.15, 0.20
"""Deviations of the logarithm, of beliefs that are called robust."""
PUBLISHED = {
    "spatial": Published(temporal=False),
    "temporal": Published(spatial=False),
    "both": Published(),
}
OURS = "ours"


@dataclass(frozen=True, slots=True)
class Effort:
    """How long searches are: rounds of the published one, evaluations of ours, and how many of its best are run."""

    rounds: int = 2000
    evaluations: int = 6000
    measured: int = 4


def rules_of(drawn: Drawn) -> Occupancy:
    """The predicted costs on a world's device: its rule is one of ours, whatever the world's is."""
    device = drawn.device
    admission = tuple(Admission)[drawn.believed]
    return Occupancy(device.launch_ns, device.gap_ns, device.sync_ns, device.event_ns, admission, Issuing.MEMBER)


def mistaken(tables: Sequence[KernelTable], drawn: Drawn) -> list[KernelTable]:
    """The predicted costs of kernels where profiles are off: every unit's time and need by a factor of its own."""
    random = np.random.default_rng((28, drawn.seed, 1))
    made = []
    for table in tables:
        times, needs = (np.exp(random.normal(0.0, error, (table.size, 1))) for error in (TIME_ERROR, NEED_ERROR))
        made.append(
            replace(
                table,
                duration_ns=table.duration_ns * times,
                need=table.need * needs,
                compute=np.minimum(1.0, table.compute / times),
                bandwidth=np.minimum(1.0, table.bandwidth / times),
            )
        )
    return made


def world_bound_ns(tables: Sequence[KernelTable], device: KernelDevice) -> float:
    """Below it is no plan in the world, whatever its chunks: slots as blocks hold them there, else as believed."""
    held = [replace(table, need=_held(table, device)) for table in tables]
    launch_ns = device.issue_ns(len(tables) - 1)
    rules = Occupancy(launch_ns, device.gap_ns, device.sync_ns, device.event_ns, Admission.FILL, Issuing.MEMBER)
    return bound_of(held, rules)


def _held(table: KernelTable, device: KernelDevice) -> Column:
    """Mean part of the slots that units hold alone."""
    costs = KernelCosts(table, device)
    by_rows = [costs.at(rows) for rows in range(1, table.batch + 1)]
    area = np.array([[kernel.blocks * kernel.work / (FULL * SLOTS) for kernel in each] for each in by_rows]).T
    return np.clip(area / np.maximum(table.duration_ns, 1.0), 1e-6, 1.0)


def judge_set(joint: JointSet, drawn: Drawn, effort: Effort) -> dict[str, Any]:
    """A row: makespans in ms by name, and how far searches went."""
    tables = joint.tables(drawn)
    world, rows = JointWorld(tables, drawn.device), [table.batch for table in tables]
    rules = rules_of(drawn)
    ours = JointSearch(evaluations=effort.evaluations, seed=drawn.seed)
    taken = {"sequential": world.in_turn(rows).makespan_ns, "streams": world.streams(rows).makespan_ns}
    row: dict[str, Any] = {"world": drawn.seed, "gpu": joint.gpu.name, "set": joint.name}
    for name, planner in PUBLISHED.items():
        found = replace(planner, rounds=effort.rounds).find(tables, rules)
        taken[name] = world.run(found.plan).makespan_ns
        row[f"{name}_plan"] = _shape(found.plan)
    taken["both_measured"] = min(taken["both"], taken["streams"])
    for name, believed in ((OURS, tables), ("robust", mistaken(tables, drawn))):
        found = ours.find(believed, rules)
        played = [world.run(plan).makespan_ns for plan in found.alternatives[: effort.measured]]
        taken[name] = min(*played, taken["streams"])
        taken[f"{name}_unmeasured"] = played[0]
        row[f"{name}_plan"] = _shape(found.plan)
        if name == OURS:
            row |= {"believed_gain": found.streams_ns / found.makespan_ns, "believed_gap_pct": found.gap_pct}
            row["belief_error"] = found.makespan_ns / played[0]
            row["streams_error"] = found.streams_ns / taken["streams"]
    taken["bound"] = world_bound_ns(tables, drawn.device)
    return row | {f"{name}_ms": ns / 1e6 for name, ns in taken.items()}


def _shape(plan: JointPlan) -> list[int]:
    """Numbers of barriers, waits and chunks."""
    return [len(plan.barriers), len(plan.waits), len(plan.chunks)]
