"""Client-side encoding of inference requests."""

from __future__ import annotations

import json
from collections.abc import Mapping

from cotenant.errors import CotenantError
from cotenant.wire.api import Array
from cotenant.wire.codec import DATATYPE_OF, encode_raw
from cotenant.wire.oip import MESSAGES

Parameters = Mapping[str, int]


class ClientError(CotenantError):
    """A request cannot be encoded, or got no outputs."""


def _datatype(name: str, array: Array) -> str:
    if array.dtype not in DATATYPE_OF:
        raise ClientError(f"input {name!r} has dtype {array.dtype}, expected one of {', '.join(map(str, DATATYPE_OF))}")
    return DATATYPE_OF[array.dtype]


def http_request(inputs: Mapping[str, Array], parameters: Parameters) -> tuple[bytes, dict[str, str]]:
    """Encode body and headers of a POST to `v2/models/M/infer` with binary inputs and outputs.

    Raises ClientError for a dtype that the protocol does not have.
    """
    buffers = {name: encode_raw(array) for name, array in inputs.items()}
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "shape": list(array.shape),
                    "datatype": _datatype(name, array),
                    "parameters": {"binary_data_size": len(buffers[name])},
                }
                for name, array in inputs.items()
            ],
            "parameters": {"binary_data_output": True, **parameters},
        },
        separators=(",", ":"),
    ).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return b"".join((head, *buffers.values())), headers


def grpc_request(model: str, inputs: Mapping[str, Array], parameters: Parameters) -> bytes:
    """Encode a serialised `ModelInferRequest` with raw contents.

    Raises ClientError for a dtype that the protocol does not have.
    """
    message = MESSAGES["ModelInferRequest"](model_name=model)
    for key, value in parameters.items():
        message.parameters[key].int64_param = value
    for name, array in inputs.items():
        message.inputs.add(name=name, datatype=_datatype(name, array), shape=array.shape)
        message.raw_input_contents.append(encode_raw(array))
    return bytes(message.SerializeToString())
