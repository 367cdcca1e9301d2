"""Control answers shared by HTTP and gRPC, as plain values under the protocol's names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cotenant.wire.api import Control, Describe, Duration, ModelStatistics

NO_OVERRIDES = (
    "parameters of a load request ('config', 'file:...') are not supported: change the files of the model repository "
    "and load again"
)
_DURATIONS = (
    *("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"),
    *("cache_hit", "cache_miss"),  # always 0: there is no response cache
)


def model_metadata(backend: Describe, model: str, version: str) -> dict[str, Any]:
    """Metadata of one model."""
    found = asdict(backend.metadata(model, version))
    del found["max_batch_size"]  # part of the configuration, not of the metadata
    for tensor in (*found["inputs"], *found["outputs"]):
        del tensor["is_ranked"]  # not part of the protocol
    return found


def model_index(backend: Control, ready_only: bool) -> list[dict[str, Any]]:
    """Lines of the repository index."""
    return [asdict(entry) for entry in backend.index(ready_only)]


def model_statistics(backend: Control, model: str, version: str) -> list[dict[str, Any]]:
    """Counters of one model, or of all if `model` is empty."""
    return [_statistics(entry) for entry in backend.statistics(model, version)]


def _statistics(entry: ModelStatistics) -> dict[str, Any]:
    return {
        "name": entry.name,
        "version": entry.version,
        "last_inference": entry.last_inference_ms,
        "inference_count": entry.inference_count,
        "execution_count": entry.execution_count,
        "inference_stats": {name: asdict(getattr(entry, name, Duration())) for name in _DURATIONS},
    }
