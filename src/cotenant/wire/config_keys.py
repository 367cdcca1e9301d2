"""Keys of the model configuration extension that models and applications share."""

from __future__ import annotations

from typing import Any

from cotenant.wire.api import TensorSpec

_CONFIG_TYPES = {"BYTES": "STRING"}


def config_tensor(spec: TensorSpec, *, batched: bool) -> dict[str, Any]:
    """Input or output in the form of the model configuration extension; without the batch dimension if `batched`."""
    dims = spec.shape[1:] if batched else spec.shape
    return {"name": spec.name, "data_type": "TYPE_" + _CONFIG_TYPES.get(spec.datatype, spec.datatype), "dims": dims}
