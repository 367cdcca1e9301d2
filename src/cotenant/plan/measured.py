"""Costs of a GPU that others measured under MPS: latencies alone, and co-runs in place of a model of interference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cotenant.plan.tables import TableCosts
from cotenant.plan.tables_csv import read_latencies
from cotenant.predict.interference_file import read_coruns, read_solo
from cotenant.predict.interference_fit import fit_pressure

SOLO, CORUNS = "solo_latency.csv", "corun_latency_train.csv"


def measured_costs(
    folder: Path, device: str, memory_bytes: Mapping[str, int] | None = None, *, seed: int = 0
) -> TableCosts:
    """L(b, p) of solo_latency.csv in a folder, with the interference that corun_latency_train.csv there tells.

    Without that file partitions are believed not to touch each other. Models that are not in `memory_bytes` take none:
    nobody measured it. Sizes are per cent of the GPU. Raises PlanError and InterferenceFileError for files that cannot
    be used.
    """
    latencies = read_latencies(folder / SOLO)
    memory = {model: (memory_bytes or {}).get(model, 0) for model in latencies}
    if not (folder / CORUNS).exists():
        return TableCosts({device: latencies}, memory)
    coruns = read_coruns(folder / CORUNS, read_solo(folder / SOLO))
    return TableCosts({device: latencies}, memory, {device: fit_pressure(coruns, seed=seed)})
