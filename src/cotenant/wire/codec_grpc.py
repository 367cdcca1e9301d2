"""gRPC codec of the Open Inference Protocol: messages to requests, results to messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cotenant.wire.api import Array, InferRequest, InferResult, ServeError, Status
from cotenant.wire.codec import (
    DTYPES,
    Limits,
    RequestedOutput,
    WireRequest,
    bad,
    check_counts,
    check_shape,
    datatype_of,
    decode_raw,
    encode_raw,
    read_classes,
    read_flag,
    read_priority,
    read_timeout_ns,
    refuse_sequence,
    requested_names,
    select_outputs,
    shown,
)
from cotenant.wire.ending import OUTCOME_KEY, Ending
from cotenant.wire.oip import MESSAGES, NO_SHARED_MEMORY, QUERY_KEY

_ModelInferRequest = MESSAGES["ModelInferRequest"]
_ModelInferResponse = MESSAGES["ModelInferResponse"]
_ModelStreamInferResponse = MESSAGES["ModelStreamInferResponse"]
_InferParameter = MESSAGES["InferParameter"]

CONTENTS_FIELD: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Datatype -> field of InferTensorContents; FP16 and BF16 have none."""


def _value(parameter: Any) -> object:
    kind = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, kind) if kind else None


def decode_request(message: Any, limits: Limits) -> WireRequest:
    """Decode a ModelInferRequest.

    Raises ServeError: INVALID_ARGUMENT for anything malformed, UNIMPLEMENTED for shared memory.
    """
    # Slices are lists; iterating a list costs a third of iterating the message's container.
    inputs, outputs, raw = message.inputs[:], message.outputs[:], message.raw_input_contents[:]
    check_counts(len(inputs), len(outputs), limits)
    if raw and len(raw) != len(inputs):
        raise bad(f"raw_input_contents has {len(raw)} tensors, expected one for each of the {len(inputs)} inputs")
    arrays: dict[str, Array] = {}
    for index, tensor in enumerate(inputs):
        name = tensor.name
        if name in arrays:
            raise bad(f"input {shown(name)} is given twice")
        datatype = tensor.datatype
        shape = tuple(tensor.shape[:])
        count = check_shape(name, datatype, shape, limits)
        parameters = tensor.parameters
        if parameters and "shared_memory_region" in parameters:
            raise ServeError(Status.UNIMPLEMENTED, f"input {shown(name)}: {NO_SHARED_MEMORY}")
        if raw:
            if tensor.HasField("contents"):
                raise bad(f"input {shown(name)} has 'contents' although raw_input_contents is given, expected only one")
            arrays[name] = decode_raw(name, datatype, shape, raw[index])
        else:
            arrays[name] = _decode_contents(name, datatype, shape, count, tensor.contents)
    priority, timeout_ns = 0, None
    parameters = message.parameters
    if parameters:
        for key, parameter in parameters.items():
            if key == "priority":
                priority = read_priority(_value(parameter))
            elif key == "timeout":
                timeout_ns = read_timeout_ns(_value(parameter))
            elif key in ("sequence_start", "sequence_end"):
                refuse_sequence(key, _value(parameter))
    requested = tuple([_read_output(output) for output in outputs])
    request = InferRequest(
        message.model_name,
        arrays,
        message.model_version,
        message.id,
        requested_names(requested) if requested else (),
        priority,
        timeout_ns,
    )
    return WireRequest(request, requested, binary_default=True)


def _read_output(output: Any) -> RequestedOutput:
    classes = 0
    if output.parameters:
        for key, parameter in output.parameters.items():
            if key == "shared_memory_region":
                raise ServeError(Status.UNIMPLEMENTED, f"output {shown(output.name)}: {NO_SHARED_MEMORY}")
            if key == "classification":
                classes = read_classes(output.name, _value(parameter))
            elif key == "binary_data":
                read_flag(key, _value(parameter))
    return RequestedOutput(output.name, True, classes)


def _decode_contents(name: str, datatype: str, shape: tuple[int, ...], count: int, contents: Any) -> Array:
    field = CONTENTS_FIELD.get(datatype)
    if field is None:
        raise bad(f"input {shown(name)}: {datatype} has no typed contents, send it in raw_input_contents")
    for other, _ in contents.ListFields():
        if other.name != field:
            raise bad(f"input {shown(name)} has {other.name}, expected {field} for {datatype}")
    values = getattr(contents, field)
    if len(values) != count:
        raise bad(
            f"input {shown(name)}: {field} has {len(values)} elements, expected {count} for shape {shown(list(shape))}"
        )
    if datatype == "BYTES":
        array: Array = np.empty(count, np.object_)
        array[:] = list(values)
        return array.reshape(shape)
    try:
        return np.array(list(values), DTYPES[datatype]).reshape(shape)
    except OverflowError:
        raise bad(f"input {shown(name)}: {field} has a number that is out of range for {datatype}") from None


def encode_response(wire: WireRequest, result: InferResult, batched: bool) -> Any:
    """Encode a ModelInferResponse; every output is in `raw_output_contents`, as clients expect."""
    message = _ModelInferResponse(model_name=wire.request.model, model_version=result.model_version, id=wire.request.id)
    message.parameters[QUERY_KEY].int64_param = result.query
    message.parameters[OUTCOME_KEY].string_param = result.outcome.value
    raw = message.raw_output_contents
    for output, array in select_outputs(wire, result.outputs, batched):
        message.outputs.add(name=output.name, datatype=datatype_of(output.name, array), shape=array.shape)
        raw.append(encode_raw(array))
    return message


def encode_failure(id_: str, sentence: str, ending: Ending) -> bytes:
    """Encode the serialised stream response of a failed request, with its ending as response parameters."""
    failure = _ModelStreamInferResponse(error_message=sentence or "the request failed without a reason")
    failure.infer_response.id = id_
    for key, value in ending.pairs():
        failure.infer_response.parameters[key].string_param = value
    data: bytes = failure.SerializeToString()
    return data


def request_flag(message: Any, name: str) -> bool:
    """Return whether a Boolean parameter of a request is true."""
    if name not in message.parameters:
        return False
    return read_flag(name, _value(message.parameters[name]))
