"""Common parts of the HTTP and gRPC codecs: limits, datatypes, raw tensors, parameters, validation by metadata.

All functions are pure; invalid input raises ServeError with a message that names the field. Tensors are little-endian
and row-major on the wire. Decoded arrays are read-only views of the raw bytes if the alignment permits.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from msgspec import Struct, structs

from cotenant.wire import api
from cotenant.wire.api import Array, InferRequest, ModelMetadata, ServeError, Status, TensorSpec

DTYPES: dict[str, np.dtype[Any]] = {**api.DATATYPES, "BF16": np.dtype(ml_dtypes.bfloat16)}
"""OIP datatype -> numpy dtype, BF16 included."""

DATATYPE_OF: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}
"""numpy dtype -> OIP datatype."""

_DATATYPE_LIST = ", ".join(DTYPES)
_LITTLE_ENDIAN = sys.byteorder == "little"
_MAX_PRIORITY = (1 << 16) - 1
_MAX_TIMEOUT_US = 365 * 24 * 3600 * 1_000_000
_MAX_CLASSES = (1 << 31) - 1
_SHOWN_CHARS = 80
_COPY_BELOW_BYTES = 16 << 10
"""Size in bytes below which tensors are copied: a copy is cheaper than a separate write."""


FREE_INFLATED_BYTES = 4 << 20
"""Decompressed size in bytes up to which the limit of the compression ratio does not apply."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a front-end for one client. A request above a limit is refused with a message that names the limit."""

    max_body_bytes: int = 64 << 20
    """Largest request in bytes, on the wire and after decompression; also the largest received gRPC message."""
    max_inflation: int = 200
    """Maximum compression ratio of a body larger than FREE_INFLATED_BYTES: compressed zeros cost a client nothing."""
    max_pending_bytes: int = 1 << 30
    """Budget in bytes for bodies that are being read, wait, or belong to live queries, shared by all models. At least
    four of the largest bodies."""
    max_json_bytes: int = 16 << 20
    """Largest JSON part of a request: parsed JSON takes many times its size in memory."""
    max_header_bytes: int = 32 << 10
    """Bytes of HTTP request line and headers together, or of gRPC metadata."""
    max_connections: int = 4096
    """Maximum open connections."""
    max_connections_per_address: int = 1024
    """Maximum open connections from one address; all clients of a gateway share its address."""
    max_head_s: float = 10.0
    """Time limit in seconds for the head of an HTTP request, or for the first frame of a gRPC connection."""
    max_body_s: float = 20.0
    """Time limit in seconds for a body or a gRPC message, plus one second per received KiB."""
    max_unread_s: float = 60.0
    """Seconds for which a client may read nothing of an answer."""
    max_malformed: int = 100
    """Malformed requests per address in 10 s that are answered without delay, and per connection before its close."""
    max_inputs: int = 256
    max_outputs: int = 256
    max_dims: int = 32
    max_elements: int = 1 << 26
    """Maximum elements of one tensor; a dimension of 0 counts as 1."""
    max_concurrent_rpcs: int = 512
    """Maximum concurrent gRPC inference calls. Further ones get UNAVAILABLE."""
    max_stream_in_flight: int = 256
    """Unanswered requests of a gRPC stream at which reading pauses."""
    max_stream_bytes: int = 64 << 20
    """Bytes of unanswered requests and of their (estimated) answers at which reading a gRPC stream pauses."""

    @property
    def pending_bytes(self) -> int:
        """Memory budget of all bodies in bytes."""
        return max(self.max_pending_bytes, 4 * self.max_body_bytes)

    def inflated_bytes(self, compressed: int) -> int:
        """Maximum decompressed size of a body of `compressed` bytes."""
        return min(self.max_body_bytes, max(FREE_INFLATED_BYTES, self.max_inflation * compressed))


class RequestedOutput(Struct, frozen=True, gc=False):
    """Requested form of an output: raw bytes or JSON. `classes`: number of best entries to send, 0 for the values."""

    name: str
    binary: bool = False
    classes: int = 0


class WireRequest(Struct, frozen=True, gc=False):
    """Decoded request with the requested form of its answer."""

    request: InferRequest
    requested: tuple[RequestedOutput, ...] = ()
    """Requested outputs in order; empty means all outputs."""
    binary_default: bool = False
    """Whether outputs are sent as raw bytes if `requested` is empty (HTTP)."""

    @property
    def wants_classes(self) -> bool:
        """Whether any output is requested as classes."""
        return bool(self.requested) and any(output.classes for output in self.requested)


def less_spent(wire: WireRequest, spent_us: str) -> WireRequest:
    """Subtract the microseconds that a gateway has already spent from a query's time-out; non-digits are ignored."""
    timeout_ns = wire.request.timeout_ns
    if timeout_ns is None or not spent_us.isdecimal():
        return wire
    left_ns = max(1, timeout_ns - int(spent_us[:18]) * 1000)
    return structs.replace(wire, request=structs.replace(wire.request, timeout_ns=left_ns))


def bad(message: str) -> ServeError:
    """Create the error of an invalid request."""
    return ServeError(Status.INVALID_ARGUMENT, message)


def shown(value: object) -> str:
    """Quote a client's value, truncated to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def check_shape(name: str, datatype: str, shape: Sequence[int], limits: Limits) -> int:
    """Check the client's datatype and shape of an input; returns the number of elements.

    Raises ServeError (INVALID_ARGUMENT) for an unknown datatype, a negative dimension, too many dimensions or elements.
    """
    if datatype not in DTYPES:
        raise bad(f"input {shown(name)}: datatype {shown(datatype)} is unknown, expected one of {_DATATYPE_LIST}")
    if len(shape) > limits.max_dims:
        raise bad(f"input {shown(name)}: shape has {len(shape)} dimensions, expected at most {limits.max_dims}")
    count = bound = 1
    for dim in shape:
        if dim < 0:
            raise bad(f"input {shown(name)}: shape {shown(list(shape))} has a negative dimension")
        count *= dim
        bound *= dim or 1
        if bound > limits.max_elements:
            raise bad(
                f"input {shown(name)}: shape {shown(list(shape))} has more than {limits.max_elements} elements, "
                "the limit for one tensor"
            )
    return count


def decode_raw(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Array:
    """Decode an array from raw little-endian bytes; shape and datatype are checked already.

    Raises ServeError if the number of bytes does not match the shape, or for a malformed BYTES or BOOL tensor.
    """
    if datatype == "BYTES":
        return _decode_bytes(name, shape, data)
    dtype = DTYPES[datatype]
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise bad(
            f"input {shown(name)}: {len(data)} bytes of binary data, expected {expected} for "
            f"{datatype}{shown(list(shape))}"
        )
    if not expected:
        return np.empty(shape, dtype)
    array: Array = np.frombuffer(data, dtype)
    if not _LITTLE_ENDIAN:
        array = array.byteswap()
    elif not array.flags.aligned:
        array = array.copy()
    if datatype == "BOOL" and int(array.view(np.uint8).max()) > 1:
        raise bad(f"input {shown(name)}: a BOOL element is neither 0 nor 1")
    return array.reshape(shape)


def _decode_bytes(name: str, shape: Sequence[int], data: bytes | memoryview) -> Array:
    view = memoryview(data)
    size = len(view)
    count = math.prod(shape)
    if 4 * count > size:
        raise bad(
            f"input {shown(name)}: {size} bytes of binary data cannot hold {count} BYTES elements, each with a 4-byte "
            "length prefix"
        )
    array = np.empty(count, np.object_)
    offset = 0
    for index in range(count):
        if offset + 4 > size:
            raise bad(f"input {shown(name)}: binary data ends before BYTES element {index} of {count}")
        (length,) = struct.unpack_from("<I", view, offset)
        offset += 4
        if length > size - offset:
            raise bad(
                f"input {shown(name)}: BYTES element {index} has length {length}, but {size - offset} bytes are left"
            )
        array[index] = bytes(view[offset : offset + length])
        offset += length
    if offset != size:
        raise bad(f"input {shown(name)}: {size - offset} surplus bytes after {count} BYTES elements")
    return array.reshape(shape)


def encode_raw(array: Array) -> bytes:
    """Encode an array as raw little-endian bytes; arrays of objects (`bytes`, `str`) or text become BYTES."""
    if array.dtype.kind in "OSU":
        parts: list[bytes] = []
        for item in array.ravel():
            data = item.encode() if isinstance(item, str) else bytes(item)
            parts += (struct.pack("<I", len(data)), data)
        return b"".join(parts)
    if not _LITTLE_ENDIAN:
        array = array.byteswap()
    return array.tobytes()


def raw_view(array: Array) -> bytes | memoryview:
    """Encode as `encode_raw`, without a copy if possible; the view keeps the array alive."""
    if array.nbytes < _COPY_BELOW_BYTES or array.dtype.kind in "OSU" or not _LITTLE_ENDIAN:
        return encode_raw(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def size_bytes(array: Array) -> int:
    """Size of a tensor in bytes, including the contents of BYTES elements."""
    if array.dtype.kind != "O":
        return array.nbytes
    return array.nbytes + sum(map(len, array.ravel().tolist()))


def datatype_of(name: str, array: Array) -> str:
    """Return the OIP datatype of an output. Raises ServeError (INTERNAL) if the protocol has none."""
    try:
        return DATATYPE_OF[array.dtype]
    except KeyError:
        if array.dtype.kind in "SU":
            return "BYTES"
        message = f"output {shown(name)} has dtype {array.dtype}, which the protocol cannot carry"
        raise ServeError(Status.INTERNAL, message) from None


def read_priority(value: object) -> int:
    """Check the request parameter `priority`: 0 (unset) or a level from 1 (most urgent)."""
    if type(value) is not int or not 0 <= value <= _MAX_PRIORITY:
        raise bad(f"parameter 'priority' is {shown(value)}, expected an integer from 0 (unset) to {_MAX_PRIORITY}")
    return value


def read_timeout_ns(value: object) -> int | None:
    """Check the request parameter `timeout` (microseconds; 0 means none) and return nanoseconds."""
    if type(value) is not int or not 0 <= value <= _MAX_TIMEOUT_US:
        raise bad(
            f"parameter 'timeout' is {shown(value)}, expected whole microseconds from 0 (none) to {_MAX_TIMEOUT_US}"
        )
    return value * 1000 or None


def read_flag(name: str, value: object) -> bool:
    """Check a Boolean parameter."""
    if type(value) is not bool:
        raise bad(f"parameter {name!r} is {shown(value)}, expected true or false")
    return value


def refuse_sequence(name: str, value: object) -> None:
    """Refuse the request parameter `sequence_start` or `sequence_end` if it is true."""
    if read_flag(name, value):
        raise bad(f"parameter {name!r} is true, but served models keep no state: send state as an input")


def read_classes(output: str, value: object) -> int:
    """Check the output parameter `classification`: number of classes, at least 1."""
    if type(value) is not int or not 1 <= value <= _MAX_CLASSES:
        raise bad(
            f"output {shown(output)}: parameter 'classification' is {shown(value)}, expected the number of classes, "
            "at least 1"
        )
    return value


def check_counts(inputs: int, outputs: int, limits: Limits) -> None:
    """Refuse a request with too many tensors before any tensor is decoded."""
    if inputs > limits.max_inputs:
        raise bad(f"request has {inputs} inputs, expected at most {limits.max_inputs}")
    if outputs > limits.max_outputs:
        raise bad(f"request asks for {outputs} outputs, expected at most {limits.max_outputs}")


def requested_names(requested: Sequence[RequestedOutput]) -> tuple[str, ...]:
    """Return the names of the requested outputs; a repeated name is refused."""
    names = tuple(output.name for output in requested)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise bad(f"output {shown(twice)} is requested twice")
    return names


def validate(request: InferRequest, metadata: ModelMetadata) -> None:
    """Validate a request against the inputs and outputs of a model.

    Shapes in the metadata are those on the wire: with `max_batch_size` > 0 the first dimension is the batch.
    Raises ServeError (INVALID_ARGUMENT) with the model, the tensor and the expected value.
    """
    arrays = request.inputs
    for spec in metadata.inputs:
        array = arrays.get(spec.name)
        if array is None:
            wanted = ", ".join(repr(other.name) for other in metadata.inputs)
            raise bad(f"{_model(metadata)}: input {spec.name!r} is missing, expected the inputs {wanted}")
        if array.dtype != DTYPES[spec.datatype]:
            found = DATATYPE_OF.get(array.dtype, str(array.dtype))
            raise bad(f"{_model(metadata)}: input {spec.name!r} has datatype {found}, expected {spec.datatype}")
        shape = array.shape
        wrong = [got for got, want in zip(shape, spec.shape, strict=False) if got != want and want != -1]
        if (wrong or len(shape) != len(spec.shape)) and (spec.is_ranked or (not shape and metadata.max_batch_size)):
            raise bad(
                f"{_model(metadata)}: input {spec.name!r} has shape {shown(list(shape))}, expected {list(spec.shape)} "
                "(-1 is any size)"
            )
        if metadata.max_batch_size and shape and not 1 <= shape[0] <= metadata.max_batch_size:
            raise bad(
                f"{_model(metadata)}: input {spec.name!r} has a batch of {shape[0]}, "
                f"expected 1 to {metadata.max_batch_size}"
            )
    if len(arrays) != len(metadata.inputs):
        known = {spec.name for spec in metadata.inputs}
        extra = next(name for name in arrays if name not in known)
        wanted = ", ".join(repr(spec.name) for spec in metadata.inputs)
        raise bad(f"{_model(metadata)}: input {shown(extra)} is unknown, expected the inputs {wanted}")
    if request.outputs:
        names = [spec.name for spec in metadata.outputs]
        for name in request.outputs:
            if name not in names:
                offered = ", ".join(map(repr, names))
                raise bad(f"{_model(metadata)}: output {shown(name)} is unknown, expected some of {offered}")


def _model(metadata: ModelMetadata) -> str:
    return f"model {shown(metadata.name)}"


def infer_raw_shape(spec: TensorSpec, size_bytes: int, max_batch_size: int) -> tuple[int, ...]:
    """Infer the shape of a single raw tensor of `size_bytes` from the declared shape.

    One unknown dimension is computed; if there are two, the batch is 1. A BYTES body is one element.
    """
    shape = list(spec.shape)
    if spec.datatype == "BYTES":
        return tuple(1 if dim == -1 else dim for dim in shape)
    unknown = [axis for axis, dim in enumerate(shape) if dim == -1]
    if len(unknown) > 1 and max_batch_size and unknown[0] == 0:
        shape[0] = 1
        unknown.pop(0)
    if len(unknown) > 1:
        raise bad(
            f"input {spec.name!r} has the shape {list(spec.shape)}: a raw body fits a model with one unknown dimension "
            "only; send the shape in an inference header"
        )
    row_bytes = math.prod(dim for dim in shape if dim != -1) * DTYPES[spec.datatype].itemsize
    if unknown:
        shape[unknown[0]] = size_bytes // row_bytes if row_bytes else 0
    return tuple(shape)


def classify(name: str, array: Array, classes: int, batched: bool) -> Array:
    """Return the `classes` largest entries of an output as bytes `value:index`, best first.

    A batched output of shape [b, ...] becomes [b, k], any other one [k]. Equal values keep the order of their indices;
    NaN comes last. Raises ServeError for datatypes without an order.
    """
    datatype = datatype_of(name, array)
    if datatype in ("BYTES", "BOOL"):
        raise bad(f"output {shown(name)} is {datatype}: 'classification' needs numbers")
    rows = array.reshape(array.shape[0], -1) if batched and array.ndim else array.reshape(1, -1)
    if datatype in ("FP16", "BF16"):
        rows = rows.astype(np.float32)
    count = min(classes, rows.shape[1])
    pattern = "%f:%d" if rows.dtype.kind == "f" else "%d:%d"
    best = np.empty((rows.shape[0], count), np.object_)
    for line, row in enumerate(rows):
        chosen = _largest(row, count)
        entries = zip(row[chosen].tolist(), chosen.tolist(), strict=True)
        best[line] = [(pattern % entry).encode() for entry in entries]
    return best if batched and array.ndim else best[0]


def _largest(row: Array, count: int) -> Array:
    """Indices of the `count` largest numbers in the order of `classify`; partial sort."""
    if row.dtype.kind == "f":
        nan = np.isnan(row)
        if nan.any():
            numbers = np.flatnonzero(~nan)
            best = numbers[_largest(row[numbers], min(count, numbers.size))]
            return np.concatenate([best, np.flatnonzero(nan)[: count - best.size]])
    if count < row.size:
        least = np.partition(row, row.size - count)[row.size - count]
        above = np.flatnonzero(row > least)
        chosen = np.concatenate([above, np.flatnonzero(row == least)[: count - above.size]])
    else:
        chosen = np.arange(row.size)
    return chosen[np.lexsort((-chosen, row[chosen]))[::-1]]


_requested_output = functools.lru_cache(maxsize=1024)(RequestedOutput)


def select_outputs(
    wire: WireRequest, outputs: Mapping[str, Array], batched: bool
) -> list[tuple[RequestedOutput, Array]]:
    """Return the outputs to send, in order, with classification applied. INTERNAL if the model omitted one."""
    if not wire.requested:
        return [(_requested_output(name, wire.binary_default), array) for name, array in outputs.items()]
    chosen = []
    for output in wire.requested:
        array = outputs.get(output.name)
        if array is None:
            raise ServeError(Status.INTERNAL, f"the model did not produce output {shown(output.name)}")
        chosen.append((output, classify(output.name, array, output.classes, batched) if output.classes else array))
    return chosen
