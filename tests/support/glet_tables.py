"""A small folder of the papers' data on partitions: the tables of a GPU that the benchmarks of plans read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SIZES = (20, 40, 50, 60, 80, 100)
BATCHES = (1, 2, 4)


def write(path: Path, head: str, lines: list[str]) -> None:
    path.write_text("\n".join((head, *lines, "")), encoding="utf-8")


def write_gpu(root: Path, models: Mapping[str, tuple[float, float]]) -> Path:
    """Write the tables of models, each with its SLO and latency in ms; give their folder, which is made."""
    folder = root / "glet"
    folder.mkdir()
    lines = [
        f"{model},{size},{batch},{base * (0.5 + 0.5 * batch) * (0.5 + 50 / size)}"
        for model, (_, base) in models.items()
        for size in SIZES
        for batch in BATCHES
    ]
    write(folder / "latency_reconstructed_2080ti.csv", "model,partition_pct,batch,latency_ms", lines)
    used = [f"{model},{batch},5,20" for model in models for batch in (1, 4)]
    write(folder / "util_2080ti.csv", "model,batch,l2_util_pct,dram_util_pct", used)
    write(folder / "interference_constants_2080ti.csv", "gpu,c1_a,c2_b,c3_c,c4_d,c5_e", ["2080ti,0.1,0.7,0.35,0.1,0.9"])
    facts = [f"{model},3x4x4 fp32,{slo},500,4" for model, (slo, _) in models.items()]
    write(folder / "models.csv", "model,input,slo_ms,memory_mb,max_batch", facts)
    constants = {
        "latency_ratio": 1.1,
        "gpu_memory_2080ti": 11000,
        "memory_usable": 0.9,
        "memory_per_partition": 1230,
        "batching_multiplier_3x4x4": 2.0,
    }
    write(folder / "artifact_constants.csv", "name,value", [f"{name},{value}" for name, value in constants.items()])
    overhead = [f"3x4x4,{batch},0.1" for batch in BATCHES]
    write(folder / "batching_overhead.csv", "input_shape,batch,mean_overhead_ms", overhead)
    return folder
