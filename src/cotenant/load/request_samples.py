"""Inputs for requests: samples of the zoo for its models, else random data of the declared shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cotenant.load.clients import ModelInfo
from cotenant.load.errors import LoadError
from cotenant.wire.api import DATATYPES, Array
from cotenant.workload import TenantLoad
from cotenant.zoo import ZooError, sample_inputs

Sample = Mapping[str, Array]
Shapes = Mapping[str, tuple[int, ...]]

_TRIES = 64
"""Draws from the zoo to find a sample of the requested shape."""


def sample_pool(load: TenantLoad, info: ModelInfo, rng: np.random.Generator, count: int) -> list[Sample]:
    """Make `count` samples of `load.items` rows for the model.

    Raises LoadError when the model has no such declared shape or takes fewer rows.
    """
    shapes = _declared(load, info)
    pool = [_from_zoo(load, info, shapes, rng) or _random(load, info, shapes, rng) for _ in range(count)]
    if load.items == 1:
        return pool
    return [{name: np.repeat(array, load.items, axis=0) for name, array in sample.items()} for sample in pool]


def slo_of(load: TenantLoad, info: ModelInfo | None) -> int:
    """SLO in nanoseconds: of the workload, else of the server. Raises LoadError if neither has one."""
    if load.slo_ns is not None:
        return load.slo_ns
    text = _parameter(info, "slo_ms")
    try:
        slo_ms = float(text or "")
    except ValueError:
        slo_ms = 0.0
    if not slo_ms > 0:
        raise LoadError(
            f"tenant {load.name!r}: the server reports no SLO of model {load.model!r} "
            "(parameter slo_ms of its configuration); set slo_ms in the workload"
        )
    return round(slo_ms * 1e6)


def _parameter(info: ModelInfo | None, name: str) -> str | None:
    if info is None:
        return None
    value = (info.config.get("parameters") or {}).get(name)
    return None if value is None else str(value.get("string_value", ""))


def _declared(load: TenantLoad, info: ModelInfo) -> Shapes | None:
    """One row of the requested declared shape; None without declared shapes. Raises LoadError."""
    text = _parameter(info, "shapes")
    declared: Sequence[Mapping[str, Sequence[int]]] = json.loads(text) if text else []
    most = int(info.config.get("max_batch_size", 0) or 0)
    reason = load.misfit(most, len(declared))
    if reason is not None:
        raise LoadError(reason)
    if not declared:
        return None
    chosen = {name: tuple(int(size) for size in shape) for name, shape in declared[load.shape].items()}
    return {name: (1, *shape[1:]) for name, shape in chosen.items()} if most > 0 else chosen


def _from_zoo(load: TenantLoad, info: ModelInfo, shapes: Shapes | None, rng: np.random.Generator) -> Sample | None:
    """A sample of the zoo's model of this name, if the served model has the same inputs."""
    for _ in range(_TRIES):
        try:
            sample = sample_inputs(load.model, rng)
        except ZooError:
            return None
        if not _fits(sample, info):
            return None
        if shapes is None or all(array.shape == shapes.get(name, array.shape) for name, array in sample.items()):
            return sample
    return None


def _fits(sample: Sample, info: ModelInfo) -> bool:
    tensors = {tensor["name"]: tensor for tensor in info.metadata.get("inputs", [])}
    if tensors.keys() != sample.keys():
        return False
    for name, array in sample.items():
        dims = [int(size) for size in tensors[name].get("shape", [])]
        if DATATYPES.get(tensors[name]["datatype"]) != array.dtype or len(dims) != array.ndim:
            return False
        if any(dim not in (-1, size) for dim, size in zip(dims, array.shape, strict=True)):
            return False
    return True


def _random(load: TenantLoad, info: ModelInfo, shapes: Shapes | None, rng: np.random.Generator) -> Sample:
    sample: dict[str, Array] = {}
    for tensor in info.metadata.get("inputs", []):
        name, datatype = tensor["name"], tensor["datatype"]
        shape = (shapes or {}).get(name) or tuple(max(1, int(size)) for size in tensor.get("shape", []))
        sample[name] = _draw(datatype, shape, rng, f"tenant {load.name!r}: input {name!r} of model {load.model!r}")
    if not sample:
        raise LoadError(f"tenant {load.name!r}: the server names no inputs for model {load.model!r}")
    return sample


def _draw(datatype: str, shape: tuple[int, ...], rng: np.random.Generator, where: str) -> Array:
    if datatype == "BYTES":
        words = np.empty(shape, object)
        words[...] = b"cotenant"
        return words
    if datatype not in DATATYPES:
        raise LoadError(f"{where} has datatype {datatype}, which cannot be made up; expected {', '.join(DATATYPES)}")
    dtype: np.dtype[Any] = DATATYPES[datatype]
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    # 0 and 1 are valid as indices, masks and token ids.
    return rng.integers(0, 2, shape).astype(dtype)
