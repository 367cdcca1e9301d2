"""Client-side decoding of inference responses to arrays: the counterpart of `encode`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from cotenant.wire.api import Array
from cotenant.wire.codec import DTYPES, decode_raw


def http_outputs(payload: bytes) -> dict[str, Array]:
    """Decode the outputs of an HTTP response: JSON, followed by binary tensors. Raises ValueError, KeyError or
    ServeError for an invalid response."""
    _, at = json.JSONDecoder().raw_decode(payload.decode("latin-1"))  # latin-1: one character per byte
    outputs: dict[str, Array] = {}
    for output in json.loads(payload[:at])["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            items = [each.encode() if isinstance(each, str) else each for each in output["data"]]
            outputs[name] = np.array(items, DTYPES.get(datatype)).reshape(shape)
        else:
            outputs[name] = decode_raw(name, datatype, shape, payload[at : at + size])
            at += size
    return outputs


def grpc_outputs(answer: Any) -> dict[str, Array]:
    """Decode the outputs of a ModelInferResponse. Raises ValueError and ServeError."""
    return {
        output.name: decode_raw(output.name, output.datatype, list(output.shape), data)
        for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }
