"""Made-up devices and costs for the tests of planners."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from cotenant.predict.latency import LatencyModel
from cotenant.techniques.partitions.plan.table_costs import GroupTimes, TableCosts
from cotenant.techniques.partitions.plan.types import CoRunner, DeviceType, Load
from cotenant.techniques.partitions.predict.factors import Interference

GIB = 1 << 30
MS = 1_000_000
GPU = DeviceType("gpu", ((100,), (20, 80), (40, 60), (50, 50)), 11 * GIB)
CPU = DeviceType("cpu", ((4,), (1, 3), (2, 2), (1, 1, 2), (1, 1, 1, 1)), 8 * GIB, price=0.5)
MODELS = {
    # fixed ms, ms a row, share that scales with the size, L2 and DRAM utilisation
    "small": (1.0, 0.1, 0.3, 0.02, 0.1),
    "middle": (4.0, 1.0, 0.6, 0.1, 0.3),
    "wide": (6.0, 2.5, 0.9, 0.2, 0.4),
    "deep": (12.0, 1.5, 0.5, 0.1, 0.2),
    "heavy": (10.0, 6.0, 0.95, 0.3, 0.6),
}
MEASURED = (1, 2, 4, 8, 16)


class Line:
    """An interference model: so much slower for each share of L2 that a co-runner takes, and for the own DRAM share."""

    def __init__(self, l2_other: float = 0.7, dram_self: float = 0.35, constant: float = 0.95) -> None:
        self._terms = l2_other, dram_self, constant

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        if not others:
            return 1.0
        _, dram_self, constant = self._terms
        added = sum(self.adds(model, batch, size, other, device) for other in others)
        return max(1.0, constant + added + dram_self * MODELS[model][4] * size / _whole(device))

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        name, rows, part = other
        return self._terms[0] * MODELS[name][3] * min(1.0, rows / 8) * part / _whole(device)

    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        return self.factor(model, batch, size, others, device)


def _whole(device: str) -> int:
    return GPU.whole if device == GPU.name else CPU.whole


def latencies(sizes: tuple[int, ...], whole: int) -> dict[str, dict[int, dict[int, int]]]:
    """Latencies of MODELS at the measured batches: a share of the time scales with the inverse of the size."""
    return {
        model: {
            size: {
                batch: math.ceil((fixed + row * batch) * (1 - scaling + scaling * whole / size) * MS)
                for batch in MEASURED
            }
            for size in sizes
        }
        for model, (fixed, row, scaling, _, _) in MODELS.items()
    }


def models_of(points: Mapping[str, Mapping[int, Mapping[int, int]]]) -> dict[str, LatencyModel]:
    """Latency models from latencies in ns by model, size and batch."""
    return {model: LatencyModel.of_points(sizes) for model, sizes in points.items()}


def table_costs(
    points: Mapping[str, Mapping[str, Mapping[int, Mapping[int, int]]]],
    memory_bytes: Mapping[str, int],
    interference: Mapping[str, Interference] | None = None,
    groups: Mapping[str, GroupTimes] | None = None,
) -> TableCosts:
    """Costs from latencies in ns by device type, model, size and batch."""
    latencies = {device: models_of(models) for device, models in points.items()}
    return TableCosts(latencies, memory_bytes, interference, groups)


def costs(memory_bytes: int = GIB) -> TableCosts:
    """Costs of MODELS on GPU and CPU, with interference on both."""
    return table_costs(
        {device.name: latencies(device.sizes, device.whole) for device in (GPU, CPU)},
        dict.fromkeys(MODELS, memory_bytes),
        dict.fromkeys((GPU.name, CPU.name), Line()),
    )


def load(model: str, rate: float, slo_ms: float, tenant: str = "") -> Load:
    return Load(tenant or model, model, rate, int(slo_ms * MS))


def some_loads(most: int = 6, most_rate: float = 400.0) -> st.SearchStrategy[list[Load]]:
    """Loads of MODELS, several of one model among them, from trivial to hopeless."""
    one = st.tuples(
        st.sampled_from(sorted(MODELS)), st.floats(1.0, most_rate), st.sampled_from((10.0, 30.0, 60.0, 120.0, 250.0))
    )
    return st.lists(one, min_size=1, max_size=most).map(
        lambda each: [load(model, rate, slo, f"t{n}") for n, (model, rate, slo) in enumerate(each)]
    )


def some_devices(most: int = 4) -> st.SearchStrategy[list[DeviceType]]:
    return st.lists(st.sampled_from((GPU, CPU)), min_size=1, max_size=most)


FINE = replace(GPU, splits=(*GPU.splits, (20, 20, 60), (20, 40, 40), (20, 20, 20, 40), (20, 20, 20, 20, 20)))


def tiny() -> st.SearchStrategy[list[Load]]:
    one = st.tuples(st.sampled_from(sorted(MODELS)), st.floats(20.0, 300.0), st.sampled_from((40.0, 80.0, 160.0)))
    return st.lists(one, min_size=1, max_size=2).map(
        lambda each: [load(model, rate, slo, f"t{n}") for n, (model, rate, slo) in enumerate(each)]
    )


TWO_WAYS = replace(GPU, splits=((100,), (20, 80)))
THREE_CORES = replace(CPU, splits=((4,), (1, 1, 2)), memory_bytes=3 * GIB)
