"""Why there is no plan: the load that misses the most after a search, and what keeps it from being served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.search.local_search import Search
from cotenant.techniques.partitions.plan.types import DEVICES, INTERFERENCE, MEMORY, DeviceType, Infeasible, Load

Relaxed = Callable[[bool, bool], bool]
"""Whether a short search serves everything, given whether interference and memory count."""


def refusal(
    loads: Sequence[Load],
    search: Search,
    devices: Sequence[DeviceType],
    cache: RoundCache,
    is_too_little: bool,
    would_do: Relaxed,
) -> Infeasible:
    """The constraint without which it would go, and the load of which the largest share stays unserved.

    A search that goes better by chance when it looks away from something proves nothing where that is not there:
    interference is named only if some model slows another down, memory only if a device cannot hold all models.
    """
    lost = search.missing(search.configs)
    worst = int((lost * search.row_values).argmax())
    load = loads[worst]
    served = load.rate_per_s - float(lost[worst])
    found = f"tenant {load.tenant!r} gets {served:.4g} of {load.rate_per_s:.4g} rows/s of model {load.model!r}"
    if is_too_little:
        detail = f"{found}; all loads together are more than these {len(devices)} devices serve, however divided"
        return Infeasible(load.tenant, DEVICES, detail)
    models = sorted({load.model for load in loads})
    if cache.interferes(models, devices) and would_do(False, True):
        return Infeasible(load.tenant, INTERFERENCE, f"{found}; the rest would fit but for interference")
    needed = sum(cache.costs.memory_bytes(model) for model in models)
    is_tight = any(kind.memory_bytes < max(map(len, kind.splits)) * (needed + kind.partition_bytes) for kind in devices)
    if is_tight and would_do(True, False):
        return Infeasible(load.tenant, MEMORY, f"{found}; the devices' memory is too little for it")
    return Infeasible(load.tenant, DEVICES, f"{found}; devices: {len(devices)}, without room for the rest")
