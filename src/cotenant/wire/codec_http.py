"""HTTP codec of the Open Inference Protocol: bodies to requests, results to bodies.

A body is JSON. If the header `Inference-Header-Content-Length` gives the length of the JSON, raw bytes of binary
tensors follow. Length 0 means that the whole body is the raw tensor of a model with one input.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Generator
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from cotenant.wire.api import Array, InferRequest, InferResult, ModelMetadata, ServeError, Status
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
    infer_raw_shape,
    raw_view,
    read_classes,
    read_flag,
    read_priority,
    read_timeout_ns,
    refuse_sequence,
    requested_names,
    select_outputs,
    shown,
)
from cotenant.wire.oip import NO_SHARED_MEMORY

T = TypeVar("T")
BodyChunk = bytes | memoryview
"""Part of a body; large tensors are views of their arrays."""

_CHUNK_ELEMENTS = 16 << 10
_NESTED = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*\[")
_GZIP = 31
_GZIP_MAGIC = b"\x1f\x8b"
_WBITS = {b"gzip": _GZIP, b"x-gzip": _GZIP, b"deflate": 15}
_FIRST_SLICE_BYTES, _MOST_SLICE_BYTES = 1 << 10, 1 << 18
"""Bytes decompressed at a time: zlib copies all bytes after the end of a member."""
INFLATE_STEP_BYTES = 1 << 20
"""Bytes that a step of `inflating` reads and writes. Copying them holds the interpreter lock."""


_NO_DATA = msgspec.Raw()


class _InputParameters(msgspec.Struct):
    binary_data_size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    shared_memory_region: Any = None


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: _InputParameters | None = None
    data: msgspec.Raw = _NO_DATA


class _OutputParameters(msgspec.Struct):
    binary_data: Any = None
    classification: Any = None
    shared_memory_region: Any = None


class _Output(msgspec.Struct):
    name: str
    parameters: _OutputParameters | None = None


class _Parameters(msgspec.Struct):
    priority: Any = 0
    timeout: Any = 0
    binary_data_output: Any = False
    sequence_start: Any = False
    sequence_end: Any = False


class _Body(msgspec.Struct):
    inputs: list[_Input]
    id: str | None = None
    parameters: _Parameters | None = None
    outputs: list[_Output] | None = None


_decode_body = msgspec.json.Decoder(_Body).decode
_encode_json = msgspec.json.Encoder().encode
_ELEMENT: dict[str, type] = {
    "BOOL": bool,
    "FP32": float,
    "FP64": float,
    "BYTES": str,
    **{name: int for name, dtype in DTYPES.items() if dtype.kind in "iu"},
}


def parse_json(what: str, decode: Any, data: bytes | memoryview) -> Any:
    """Decode JSON with a msgspec decoder. Raises ServeError (INVALID_ARGUMENT) with the position of an error."""
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise bad(f"{what}: {error}") from None
    except msgspec.DecodeError as error:
        raise bad(f"{what}: {error} (NaN and Infinity are not JSON; send such values as binary data)") from None
    except UnicodeDecodeError:
        raise bad(f"{what}: the text is not valid UTF-8") from None
    except RecursionError:
        raise bad(f"{what}: arrays or objects are nested too deeply") from None


def decode_request(
    model: str, version: str, body: bytes | memoryview, header_length: int | None, limits: Limits
) -> WireRequest:
    """Decode the body of an infer request. `header_length`: length of its JSON in bytes, None for the whole body.

    Raises ServeError: INVALID_ARGUMENT for a malformed request, UNIMPLEMENTED for shared memory, TOO_LARGE for JSON
    above the limit.
    """
    view = memoryview(body)
    json_length = len(view) if header_length is None else header_length
    if json_length > len(view):
        raise bad(f"header 'Inference-Header-Content-Length' is {json_length}, but the body has {len(view)} bytes")
    if json_length > limits.max_json_bytes:
        raise ServeError(
            Status.TOO_LARGE,
            f"the JSON of the request has {json_length} bytes, expected at most {limits.max_json_bytes}; send large "
            "tensors as binary data",
        )
    message: _Body = parse_json("request JSON", _decode_body, view[:json_length])
    outputs = message.outputs or ()
    check_counts(len(message.inputs), len(outputs), limits)
    arrays: dict[str, Array] = {}
    offset = json_length
    for tensor in message.inputs:
        name = tensor.name
        if name in arrays:
            raise bad(f"input {shown(name)} is given twice")
        count = check_shape(name, tensor.datatype, tensor.shape, limits)
        parameters = tensor.parameters
        if parameters is not None and parameters.shared_memory_region is not None:
            raise ServeError(Status.UNIMPLEMENTED, f"input {shown(name)}: {NO_SHARED_MEMORY}")
        size = parameters.binary_data_size if parameters is not None else None
        if size is None:
            if _is_absent(tensor.data):
                raise bad(f"input {shown(name)} has neither 'data' nor the parameter 'binary_data_size'")
            arrays[name] = _decode_data(name, tensor.datatype, tensor.shape, count, tensor.data)
            continue
        if not _is_absent(tensor.data):
            raise bad(f"input {shown(name)} has both 'data' and the parameter 'binary_data_size', expected one of them")
        if header_length is None:
            raise bad(
                f"input {shown(name)} has the parameter 'binary_data_size', which needs the header "
                "'Inference-Header-Content-Length'"
            )
        if size > len(view) - offset:
            raise bad(
                f"input {shown(name)}: parameter 'binary_data_size' is {size}, but {len(view) - offset} bytes of the "
                "body are left"
            )
        arrays[name] = decode_raw(name, tensor.datatype, tensor.shape, view[offset : offset + size])
        offset += size
    if offset != len(view):
        raise bad(f"the body has {len(view) - offset} surplus bytes after the last binary tensor")
    wanted = message.parameters
    binary_default = wanted is not None and read_flag("binary_data_output", wanted.binary_data_output)
    if wanted is not None:
        refuse_sequence("sequence_start", wanted.sequence_start)
        refuse_sequence("sequence_end", wanted.sequence_end)
    requested = tuple([_read_output(output, binary_default) for output in outputs])
    request = InferRequest(
        model,
        arrays,
        version,
        message.id or "",
        requested_names(requested) if requested else (),
        read_priority(wanted.priority) if wanted is not None else 0,
        read_timeout_ns(wanted.timeout) if wanted is not None else None,
    )
    return WireRequest(request, requested, binary_default)


def decode_raw_request(metadata: ModelMetadata, version: str, body: bytes | memoryview, limits: Limits) -> WireRequest:
    """Decode a body that is the raw tensor of the model's only input; outputs are returned raw too."""
    if len(metadata.inputs) != 1:
        raise bad(
            f"model {shown(metadata.name)} has {len(metadata.inputs)} inputs: a body without JSON "
            "('Inference-Header-Content-Length: 0') fits models with one input only"
        )
    spec = metadata.inputs[0]
    shape = infer_raw_shape(spec, len(body), metadata.max_batch_size)
    count = check_shape(spec.name, spec.datatype, shape, limits)
    if spec.datatype == "BYTES":
        if count != 1:
            raise bad(f"input {spec.name!r} has {count} BYTES elements: a raw body carries one")
        array: Array = np.empty(1, np.object_)
        array[0] = bytes(body)
        array = array.reshape(shape)
    else:
        array = decode_raw(spec.name, spec.datatype, shape, body)
    return WireRequest(InferRequest(metadata.name, {spec.name: array}, version), binary_default=True)


def _is_absent(data: msgspec.Raw) -> bool:
    return data is _NO_DATA or bytes(memoryview(data)[:5]) in (b"", b"null")


def _read_output(output: _Output, binary_default: bool) -> RequestedOutput:
    parameters = output.parameters
    if parameters is None:
        return RequestedOutput(output.name, binary_default)
    if parameters.shared_memory_region is not None:
        raise ServeError(Status.UNIMPLEMENTED, f"output {shown(output.name)}: {NO_SHARED_MEMORY}")
    binary = parameters.binary_data
    classes = parameters.classification
    return RequestedOutput(
        output.name,
        binary_default if binary is None else read_flag("binary_data", binary),
        0 if classes is None else read_classes(output.name, classes),
    )


@functools.lru_cache(maxsize=256)
def _data_decoder(datatype: str, depth: int) -> Any:
    kind: Any = _ELEMENT[datatype]
    for _ in range(depth):
        kind = list[kind]
    return msgspec.json.Decoder(kind).decode


def _decode_data(name: str, datatype: str, shape: tuple[int, ...], count: int, data: msgspec.Raw) -> Array:
    if datatype not in _ELEMENT:
        raise bad(f"input {shown(name)}: {datatype} has no JSON form, send it as binary data")
    nested = len(shape) > 1 and _NESTED.match(data) is not None
    what = f"input {shown(name)}: data"
    values = parse_json(what, _data_decoder(datatype, len(shape) if nested else 1), data)
    if nested:
        values = _flatten(name, values, shape)
    if len(values) != count:
        raise bad(f"{what} has {len(values)} elements, expected {count} for shape {shown(list(shape))}")
    if datatype == "BYTES":
        array: Array = np.empty(count, np.object_)
        array[:] = [text.encode() for text in values]
        return array.reshape(shape)
    try:
        with np.errstate(over="raise"):
            return np.array(values, DTYPES[datatype]).reshape(shape)
    except (OverflowError, FloatingPointError):
        raise bad(f"{what} has a number that is out of range for {datatype}") from None


def _flatten(name: str, values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    rows = [values]
    for axis, size in enumerate(shape):
        if axis:
            rows = [row for outer in rows for row in outer]
        for row in rows:
            if len(row) != size:
                raise bad(
                    f"input {shown(name)}: data has a row of {len(row)} entries along dimension {axis}, expected "
                    f"{size} for shape {shown(list(shape))}"
                )
    return [value for row in rows for value in row]


def encode_response(wire: WireRequest, result: InferResult, batched: bool) -> tuple[list[BodyChunk], int | None]:
    """Encode the body of an answer in chunks; also returns the length of its JSON if raw tensors follow. Raises
    ServeError if an output has no JSON form (NaN, infinity, bytes that are not text, FP16, BF16)."""
    described: list[dict[str, Any]] = []
    raw: list[BodyChunk] = []
    for output, array in select_outputs(wire, result.outputs, batched):
        datatype = datatype_of(output.name, array)
        entry: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": array.shape}
        if output.binary:
            data = raw_view(array)
            entry["parameters"] = {"binary_data_size": len(data)}
            raw.append(data)
        else:
            entry["data"] = _json_values(output.name, datatype, array)
        described.append(entry)
    message: dict[str, Any] = {"model_name": wire.request.model, "model_version": result.model_version}
    if wire.request.id:
        message["id"] = wire.request.id
    message["outputs"] = described
    head = _encode_json(message)
    if not raw and not wire.binary_default and not any(output.binary for output in wire.requested):
        return [head], None
    return [head, *raw], len(head)


def _json_values(name: str, datatype: str, array: Array) -> list[Any] | msgspec.Raw:
    """Elements of an output for JSON. Large outputs are encoded in chunks, so that other threads run in between."""
    advice = "request it with the output parameter 'binary_data': true"
    if datatype in ("FP16", "BF16"):
        raise bad(f"output {shown(name)}: {datatype} has no JSON form, {advice}")
    flat = array.ravel()
    if datatype in ("FP32", "FP64") and not np.isfinite(flat).all():
        raise bad(f"output {shown(name)} has NaN or infinite values, which JSON cannot carry, {advice}")
    values = _texts if datatype == "BYTES" else _numbers
    try:
        if flat.size <= _CHUNK_ELEMENTS:
            return values(flat)
        starts = range(0, flat.size, _CHUNK_ELEMENTS)
        chunks = [_encode_json(values(flat[at : at + _CHUNK_ELEMENTS]))[1:-1] for at in starts]
    except UnicodeDecodeError:
        raise bad(f"output {shown(name)} has bytes that are not UTF-8 text, {advice}") from None
    return msgspec.Raw(b"[%b]" % b",".join(chunks))


def _numbers(items: Array) -> list[Any]:
    values: list[Any] = items.tolist()
    return values


def _texts(items: Array) -> list[Any]:
    return [item if isinstance(item, str) else bytes(item).decode() for item in items]


def at_once(steps: Generator[int, None, T]) -> T:
    """Run work in steps, such as `inflating`, to its end; returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made


def inflating(encoding: bytes, body: bytes | memoryview, limits: Limits) -> Generator[int, None, memoryview]:
    """Decompress `Content-Encoding` gzip (one or several members, RFC 1952) or deflate, up to the limits of a body.

    It works in steps of about INFLATE_STEP_BYTES and yields the bytes of the next step. Raises ServeError for invalid
    data (INVALID_ARGUMENT) and above the limits (TOO_LARGE).
    """
    wbits = _WBITS.get(encoding)
    if wbits is None:
        raise bad(f"header 'Content-Encoding' is {shown(encoding.decode('latin-1'))}, expected gzip or deflate")
    name, view, out = encoding.decode(), memoryview(body), bytearray()
    most = limits.inflated_bytes(len(view))
    at = members = worked = 0
    while at < len(view) or not members:
        machine, size, members = zlib.decompressobj(wbits), _FIRST_SLICE_BYTES, members + 1
        while not machine.eof:
            fed: bytes | memoryview = machine.unconsumed_tail
            if not fed:
                fed = view[at : at + size]
                at += len(fed)
                size = min(2 * size, _MOST_SLICE_BYTES)
            try:
                made = machine.decompress(fed, INFLATE_STEP_BYTES)
            except zlib.error as error:
                raise bad(f"the body is not valid {name} data: {error}") from None
            if not made and not fed and not machine.eof:
                raise bad(f"the {name} body is truncated")
            out += made
            if len(out) > most:
                text = f"the decompressed body has more than {most} bytes, the limit for one of {len(view)} bytes"
                raise ServeError(Status.TOO_LARGE, text)
            worked += max(_FIRST_SLICE_BYTES, len(fed) + len(made))  # small members take time too
            if worked >= INFLATE_STEP_BYTES:
                worked = 0
                yield INFLATE_STEP_BYTES
        at -= len(machine.unused_data)
        if at < len(view) and (wbits != _GZIP or bytes(view[at : at + 2]) != _GZIP_MAGIC):
            raise bad(f"the body has {len(view) - at} surplus bytes after the {name} data")
    return memoryview(out).toreadonly()


def inflated_start(encoding: bytes, start: bytes, most_bytes: int) -> bytes:
    """Decompress at most `most_bytes` from the start of a compressed body; b"" for invalid data."""
    wbits = _WBITS.get(encoding)
    try:
        return zlib.decompressobj(wbits).decompress(start, most_bytes) if wbits is not None else b""
    except zlib.error:
        return b""


def compress(encoding: bytes, body: bytes) -> bytes:
    """Compress by `Content-Encoding` gzip or deflate at the fastest level, to save processor time for tenants."""
    machine = zlib.compressobj(1, zlib.DEFLATED, _WBITS[encoding])
    return machine.compress(body) + machine.flush()


def read_header_length(value: bytes) -> int:
    """Read the header `Inference-Header-Content-Length`."""
    if not value.isdigit() or len(value) > 18:
        raise bad(
            f"header 'Inference-Header-Content-Length' is {shown(value.decode('latin-1'))}, expected the number of "
            "bytes of JSON"
        )
    return int(value)
