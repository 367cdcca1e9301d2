"""Answers held against what the same inputs were answered alone: nobody may get somebody else's, or half of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from cotenant.serve.api import Array
from cotenant.serve.codec import decode_raw

WRONG = "wrong answer:"
"""How the reason of a query begins that was answered with something else."""
_TOLERANCE = 1e-2
"""Of the largest number of an output: other batches take other kernels, which round otherwise."""
_NUMPY = {"FP32": np.float32, "FP64": np.float64, "BOOL": np.bool_, "BYTES": np.object_}


class AnswerCheck:
    """What each prepared request of a tenant was answered first, and whether later answers are the same."""

    def __init__(self) -> None:
        self._known: dict[int, Mapping[str, Array]] = {}

    def fault(self, request: int, outputs: Mapping[str, Array]) -> str:
        """What is wrong with an answer to a prepared request, "" if nothing is. The first is the one to go by."""
        known = self._known.setdefault(request, outputs)
        if known is outputs:
            return ""
        if known.keys() != outputs.keys():
            return f"{WRONG} outputs {', '.join(outputs)}, expected {', '.join(known)}"
        for name, array in outputs.items():
            if array.shape != known[name].shape:
                return f"{WRONG} output {name!r} has shape {array.shape}, expected {known[name].shape}"
            if not _are_alike(array, known[name]):
                return f"{WRONG} output {name!r} has other values than when it was asked alone"
        return ""


def http_outputs(payload: bytes) -> dict[str, Array]:
    """The outputs of an answer over HTTP: JSON, and what is binary behind it. Raises ValueError, KeyError or ServeError
    for what is none."""
    # A character a byte; texts in the JSON that are not ASCII come out wrong, but each time in the same way.
    head, at = json.JSONDecoder().raw_decode(payload.decode("latin-1"))
    outputs: dict[str, Array] = {}
    for output in head["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            items = [each.encode() if isinstance(each, str) else each for each in output["data"]]
            outputs[name] = np.array(items, _NUMPY.get(datatype)).reshape(shape)
        else:
            outputs[name] = decode_raw(name, datatype, shape, payload[at : at + size])
            at += size
    return outputs


def grpc_outputs(answer: Any) -> dict[str, Array]:
    """The outputs of a ModelInferResponse. Raises ValueError and ServeError."""
    return {
        output.name: decode_raw(output.name, output.datatype, list(output.shape), data)
        for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }


def _are_alike(one: Array, other: Array) -> bool:
    if one.dtype.kind not in "fc":
        return bool((one == other).all())
    most = float(np.abs(other).max(initial=0.0))
    return bool(np.allclose(one, other, rtol=0.0, atol=_TOLERANCE * most, equal_nan=True))
