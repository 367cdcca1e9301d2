"""The mixes of models and the applications of the paper, at any rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench._data import read_rows
from bench._registry import BenchError
from bench.papers.gpulet._data import Gpu
from cotenant.techniques.partitions.plan.application import Application, Stage, stage_loads
from cotenant.techniques.partitions.plan.types import Load


@dataclass(frozen=True, slots=True)
class Workload:
    """Loads and applications with rates in fixed proportions. `shares` are of the total rate, by model."""

    name: str
    shares: tuple[tuple[str, float], ...] = ()
    slo_ns: int = 0
    stages: tuple[Stage, ...] = ()

    def at(self, rate: float, gpu: Gpu) -> tuple[tuple[Load, ...], tuple[Application, ...]]:
        """Loads, those of stages among them, and applications, at a total rate of queries a second."""
        if self.stages:
            app = Application(self.name, self.slo_ns, rate, self.stages)
            return stage_loads(app, [gpu.device], gpu.costs), (app,)
        return tuple(gpu.load(model, rate * share) for model, share in self.shares), ()


def read_specloads(data_dir: Path, gpu: Gpu) -> tuple[Workload, ...]:
    """The scenarios of the paper's Table 5, then its applications, as far as the GPU's profile has their models.

    Applications have the SLO of the paper, for the whole. Raises BenchError where a file is missing or leaves nothing.
    """
    shares: dict[str, list[tuple[str, float]]] = {}
    for row in read_rows(data_dir / "glet" / "scenarios.csv", "scenario", "model", "rate_share"):
        shares.setdefault(row["scenario"], []).append((row["model"], float(row["rate_share"])))
    stages: dict[str, list[Stage]] = {}
    slos: dict[str, int] = {}
    for row in read_rows(data_dir / "glet" / "apps.csv", "app", "node", "model", "parents", "slo_paper_ms"):
        parents = tuple(name for name in row["parents"].split(";") if name not in ("", "input"))
        stages.setdefault(row["app"], []).append(Stage(row["node"], row["model"], parents))
        slos[row["app"]] = round(float(row["slo_paper_ms"].split()[0]) * 1e6)
    found = [Workload(name, tuple((m, s / sum(s for _, s in each)) for m, s in each)) for name, each in shares.items()]
    found += [Workload(name, slo_ns=slos[name], stages=tuple(each)) for name, each in sorted(stages.items())]
    known = tuple(workload for workload in found if _models(workload) <= set(gpu.models))
    if not known:
        raise BenchError("the profile has all models of none of the paper's scenarios and applications")
    return known


def _models(workload: Workload) -> set[str]:
    return {model for model, _ in workload.shares} | {stage.model for stage in workload.stages}
