"""What HTTP and gRPC answer alike, but for infer: plain values under the protocol's names."""

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
    *("cache_hit", "cache_miss"),  # which nobody counts: there is no cache
)


def model_metadata(backend: Describe, model: str, version: str) -> dict[str, Any]:
    """The metadata of one model."""
    found = asdict(backend.metadata(model, version))
    del found["max_batch_size"]  # which is told in the configuration
    for tensor in (*found["inputs"], *found["outputs"]):
        del tensor["is_ranked"]  # for which the protocol has no word
    return found


def model_index(backend: Control, ready_only: bool) -> list[dict[str, Any]]:
    """The lines of the repository index."""
    return [asdict(entry) for entry in backend.index(ready_only)]


def model_statistics(backend: Control, model: str, version: str) -> list[dict[str, Any]]:
    """The counters of one model, or of all when `model` is empty."""
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
