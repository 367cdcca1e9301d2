"""Reason for an infeasible instance: the load with the largest unserved share, and the constraint that breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.search.local_search import Search
from cotenant.techniques.partitions.plan.types import DEVICES, INTERFERENCE, MEMORY, DeviceType, Infeasible, Load

Relaxed = Callable[[bool, bool], bool]
"""Whether a short search serves all loads, given whether interference and memory are constraints."""


def refusal(
    loads: Sequence[Load],
    search: Search,
    devices: Sequence[DeviceType],
    cache: RoundCache,
    is_too_little: bool,
    would_do: Relaxed,
) -> Infeasible:
    """The constraint without which the loads fit, and the load with the largest unserved share.

    A relaxed search may succeed by chance. So interference is named only if some model slows another one down, and
    memory only if a device cannot hold all models.
    """
    lost = search.missing(search.configs)
    worst = int((lost * search.row_values).argmax())
    load = loads[worst]
    served = load.rate_per_s - float(lost[worst])
    found = f"tenant {load.tenant!r} gets {served:.4g} of {load.rate_per_s:.4g} rows/s of model {load.model!r}"
    if is_too_little:
        detail = f"{found}; no split of these {len(devices)} devices serves all loads"
        return Infeasible(load.tenant, DEVICES, detail)
    models = sorted({load.model for load in loads})
    if cache.interferes(models, devices) and would_do(False, True):
        return Infeasible(load.tenant, INTERFERENCE, f"{found}; the rest would fit but for interference")
    needed = sum(cache.costs.memory_bytes(model) for model in models)
    is_tight = any(kind.memory_bytes < max(map(len, kind.splits)) * (needed + kind.partition_bytes) for kind in devices)
    if is_tight and would_do(True, False):
        return Infeasible(load.tenant, MEMORY, f"{found}; the devices' memory is too small for it")
    return Infeasible(load.tenant, DEVICES, f"{found}; devices: {len(devices)}, without room for the rest")
