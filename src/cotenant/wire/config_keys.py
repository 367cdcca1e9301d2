"""The keys of the protocol's model configuration extension that models and applications have in common."""

from __future__ import annotations

from typing import Any

from cotenant.wire.api import TensorSpec

_CONFIG_TYPES = {"BYTES": "STRING"}


def config_tensor(spec: TensorSpec, *, batched: bool) -> dict[str, Any]:
    """An input or output in the keys of the model configuration extension: without the batch where there is one."""
    dims = spec.shape[1:] if batched else spec.shape
    return {"name": spec.name, "data_type": "TYPE_" + _CONFIG_TYPES.get(spec.datatype, spec.datatype), "dims": dims}
