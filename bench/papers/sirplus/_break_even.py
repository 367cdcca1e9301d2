"""How many units of a detector can ever pay on the CPU, by the cost of a launch on the GPU and of a crossing.

A group of operators pays by itself on a lane of the CPU under two conditions. First, the GPU is spared more than the
copies cost it, which keep its queue as in the engine of the paper. Second, the group and its copies end in time. That
is before the GPU has done all operators that do not wait for the group, and the group itself, had it stayed. Groups are
the product's units, and blocks of operators between hubs of 12, 4 and 2 neighbours: branches, parts of them, chains. A
unit can pay if all of its operators are in groups that do. A tensor from outside that several groups read is copied
once: each bears its part. So this is generous: how many can pay at all, not how many pay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.papers.sirplus._detectors import DetectorWorld, detector_units, task_graph
from cotenant.techniques.placement.plan.contract import blocks_of
from cotenant.techniques.placement.plan.flat import PlacementProblem
from cotenant.techniques.placement.plan.overflow import FANS

LAUNCHES_US = (1.0, 2.0, 5.0, 8.0, 12.0)
CROSSINGS_US = (5.0, 10.0, 20.0, 50.0, 200.0)
WORLD = DetectorWorld(8.0, 12e9, 0.0, 7.0, 20.0, 1)
"""A typical one. Launch and crossing cost are those of the table."""
_GPU, _CPU = 0, 1


def break_even(model: str) -> list[dict[str, Any]]:
    """A row for each launch and crossing cost: how many units can pay, and their share of the time on the GPU."""
    problem = PlacementProblem(task_graph(model, replace(WORLD, launch_us=0.0)))
    units = np.array(detector_units(model))
    groups = [list(np.flatnonzero(units == unit)) for unit in np.unique(units)]
    for fan in FANS:
        groups += blocks_of(problem, fan)
    facts = _facts(problem, groups)
    members = np.zeros((len(groups), problem.size), dtype=bool)
    for number, group in enumerate(groups):
        members[number, group] = True
    gpu_us = np.array(problem.service)[:, _GPU] / 1e3
    rows = []
    for launch in LAUNCHES_US:
        for crossing in CROSSINGS_US:
            ours = launch * facts["size"] + facts["gpu_us"]
            beside = launch * facts["beside"] + facts["beside_us"]
            copies = crossing * facts["copies"] + facts["bytes_us"]
            pays = (copies < ours) & (facts["cpu_us"] + copies < ours + beside)
            can = members[pays].any(axis=0)
            whole = [unit for unit in np.unique(units) if can[units == unit].all()]
            time_us = launch + gpu_us
            rows.append(
                {
                    "model": model,
                    "launch_us": launch,
                    "crossing_us": crossing,
                    "units": len(np.unique(units)),
                    "can_pay": len(whole),
                    "time_pct": float(100 * time_us[np.isin(units, whole)].sum() / time_us.sum()),
                }
            )
    return rows


def _facts(problem: PlacementProblem, groups: Sequence[Sequence[int]]) -> dict[str, NDArray[np.float64]]:
    """By group: operators, times, copies (parts of them) and the time of their bytes, and the operators beside it."""
    size = problem.size
    before = np.zeros((size, size), dtype=bool)
    for i, preds in enumerate(problem.preds):
        for j in preds:
            before[i] |= before[j]
            before[i, j] = True
    service = np.array(problem.service) / 1e3
    made: list[list[int]] = [[] for _ in range(size)]
    for tensor, producer in enumerate(problem.producer):
        made[producer].append(tensor)
    rows = []
    for group in groups:
        inside = np.zeros(size, dtype=bool)
        inside[group] = True
        free = ~(before[group].any(axis=0) | before[:, group].any(axis=1) | inside)
        copies = bytes_us = 0.0
        for tensor in sorted({t for i in group for t in (*problem.inputs[i], *made[i])}):
            producer, readers = problem.producer[tensor], problem.readers[tensor]
            own = sum(1 for reader in readers if inside[reader])
            if inside[producer] and own < len(readers):
                part = 1.0
            elif own and not inside[producer]:
                part = own / len(readers)
            else:
                continue
            copies += part
            bytes_us += part * problem.copy_ns(tensor, problem.space[_GPU], problem.space[_CPU]) / 1e3
        times = service[group].sum(axis=0)
        rows.append((len(group), times[_GPU], times[_CPU], copies, bytes_us, free.sum(), service[free, _GPU].sum()))
    columns = np.array(rows, dtype=np.float64).T
    return dict(zip(("size", "gpu_us", "cpu_us", "copies", "bytes_us", "beside", "beside_us"), columns, strict=True))


def show_break_even(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """A table for each model."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        table = Table(
            title=f"{model}: of {mine[0]['units']} units how many can ever pay (their share of the GPU's time)"
        )
        table.add_column("launch us", justify="right")
        for crossing in CROSSINGS_US:
            table.add_column(f"crossing {crossing:g} us", justify="right")
        for launch in LAUNCHES_US:
            cells = [f"{row['can_pay']} ({row['time_pct']:.0f} %)" for row in mine if row["launch_us"] == launch]
            table.add_row(f"{launch:g}", *cells)
        console.print(table)
