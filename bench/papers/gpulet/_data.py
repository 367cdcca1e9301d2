"""The GPU of the paper as tables, with the constants of its artifact, and the planners that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench._data import read_rows
from bench._registry import BenchError
from bench.papers.gpulet._interference_csv import read_constants, read_utilisation
from bench.papers.gpulet._linear import LinearInterference
from bench.papers.gpulet._tables_csv import (
    ModelFacts,
    read_assembly,
    read_latencies,
    read_models,
)
from cotenant.predict.latency import LatencyModel
from cotenant.techniques.partitions.plan.table_costs import TableCosts
from cotenant.techniques.partitions.plan.types import NS_PER_MS, DeviceType, Load

GPU = "2080ti"
Files = tuple[Path, Path | None, Path | None, Path | None]
"""The data folder, and instead of its own a profile, a table of utilisation, and constants: what `read_gpu` takes."""
OURS = "ours"
SPLITS = ((100,), (20, 80), (40, 60), (50, 50))
FINE_SPLITS = (*SPLITS, (20, 20, 60), (20, 40, 40), (20, 20, 50), (20, 20, 20, 40), (20, 20, 20, 20, 20))
"""The paper's splits and all finer ones into the sizes that its profile has."""
_BYTES_PER_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of device with its costs, and facts by model in the order of the file of models."""

    device: DeviceType
    costs: TableCosts
    models: Mapping[str, ModelFacts]

    @property
    def fine(self) -> DeviceType:
        """The same device, which may be split more finely than the paper does."""
        return replace(self.device, splits=FINE_SPLITS)

    def device_of(self, planner: str) -> DeviceType:
        """The device that a planner of this name is given: the fine one for ours, the paper's for all others."""
        return self.fine if planner == OURS else self.device

    def load(self, model: str, rate: float, tenant: str = "") -> Load:
        """What a tenant asks for, at the SLO of the paper's Table 4."""
        return Load(tenant or model, model, rate, self.models[model].slo_ns)


def read_gpu(
    data_dir: Path,
    profile: Path | None = None,
    util: Path | None = None,
    constants: Path | None = None,
    *,
    padded: bool = True,
) -> Gpu:
    """The GPU of the data folder, or of other files of the same forms, with the models that the paper gives an SLO.

    `padded` plans as the artifact does, with its latency ratio and its measured time to assemble a batch. Otherwise the
    latencies are those of the profile alone. Raises BenchError or PlanError for a file that cannot be used.
    """
    folder = data_dir / "glet"
    models = read_models(folder / "models.csv")
    latencies = read_latencies(profile or folder / "latency_reconstructed_2080ti.csv")
    utilisation = read_utilisation(util or folder / "util_2080ti.csv")
    known = {model: facts for model, facts in models.items() if model in latencies}
    if not known:
        raise BenchError(f"{profile}: has none of the models of {folder / 'models.csv'}: {', '.join(models)}")
    unseen = [model for model in known if model not in utilisation.table.models]
    if unseen:
        raise BenchError(f"{util or folder / 'util_2080ti.csv'}: has no utilisation of model {unseen[0]!r}")
    fixed = read_fixed(folder / "artifact_constants.csv")
    line = read_constants(constants or folder / "interference_constants_2080ti.csv")
    assembly = _assembly(known, folder, fixed) if padded else {}
    costs = TableCosts(
        {GPU: {name: LatencyModel.of_points(_capped(latencies[name], each.max_batch)) for name, each in known.items()}},
        {model: facts.memory_bytes for model, facts in known.items()},
        {GPU: LinearInterference(line, utilisation)},
        latency_ratio=fixed["latency_ratio"] if padded else 1.0,
        overhead=lambda device, model, batch, size: assembly.get(model, {}).get(batch, 0),
    )
    memory = int(fixed["gpu_memory_2080ti"] * fixed["memory_usable"]) * _BYTES_PER_MB
    device = DeviceType(GPU, SPLITS, memory, partition_bytes=int(fixed["memory_per_partition"]) * _BYTES_PER_MB)
    return Gpu(device, costs, known)


def read_fixed(path: Path) -> dict[str, float]:
    """The constants of the artifact that are numbers, by name."""
    return {row["name"]: float(row["value"]) for row in read_rows(path, "name", "value")}


def _capped(sizes: Mapping[int, Mapping[int, int]], most: int) -> dict[int, dict[int, int]]:
    return {size: {batch: ns for batch, ns in points.items() if batch <= most} for size, points in sizes.items()}


def _assembly(models: Mapping[str, ModelFacts], folder: Path, fixed: Mapping[str, float]) -> dict[str, dict[int, int]]:
    """Time to assemble a batch by model and batch, with the multipliers and constants of the artifact."""
    measured = read_assembly(folder / "batching_overhead.csv")
    found = {}
    for model, facts in models.items():
        shape = facts.input.split()[0]
        constant = fixed.get(f"batching_overhead_{model}")
        ratio = fixed.get(f"batching_multiplier_{shape}")
        ms = dict.fromkeys(range(1, facts.max_batch + 1), constant or 0.0)
        if constant is None and ratio is not None:
            ms = {batch: ratio * overhead for batch, overhead in measured[shape].items()}
        found[model] = {batch: round(each * NS_PER_MS) for batch, each in ms.items()}
    return found
