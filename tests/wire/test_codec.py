"""Codecs alone: tensors of every datatype, malformed requests, the check against metadata."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.types import Outcome
from cotenant.wire import codec, codec_grpc, codec_http
from cotenant.wire.api import InferRequest, InferResult, ModelMetadata, ServeError, Status, TensorSpec
from cotenant.wire.codec import DTYPES, Limits, RequestedOutput, WireRequest
from cotenant.wire.decode import grpc_outputs, http_outputs
from cotenant.wire.oip import MESSAGES
from fake_backend import MODELS, sample

LIMITS = Limits()
NO_JSON = ("FP16", "BF16")
Tensor = np.ndarray[Any, np.dtype[Any]]


def refused(call: Any, *fragments: str, status: Status = Status.INVALID_ARGUMENT) -> str:
    with pytest.raises(ServeError) as caught:
        call()
    assert caught.value.status is status
    for fragment in fragments:
        assert fragment in caught.value.message
    return caught.value.message


def decompress(encoding: bytes, body: bytes, limits: Limits) -> memoryview:
    return codec_http.at_once(codec_http.inflating(encoding, body, limits))


def decode_json(value: Any, raw: bytes = b"", header: bool | None = None) -> WireRequest:
    head = value if isinstance(value, bytes) else json.dumps(value).encode()
    length = len(head) if (raw or header) else None
    return codec_http.decode_request("m", "", head + raw, length, LIMITS)


def one_input(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2.5]} | changes
    return {"inputs": [{key: value for key, value in tensor.items() if value is not None}]}


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


@pytest.mark.parametrize("datatype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (1,), ()])
def test_raw_bytes_come_back_as_they_were(datatype: str, shape: tuple[int, ...]) -> None:
    array = sample(datatype, shape)
    data = codec.encode_raw(array)
    for buffer in (data, memoryview(b"." + data)[1:]):
        assert same(codec.decode_raw("x", datatype, shape, buffer), array)


@pytest.mark.parametrize("dtype", [object, "U", "S"])
def test_text_outputs_of_any_dtype_are_bytes(dtype: Any) -> None:
    array = np.array(["é" if dtype != "S" else "e", "ab"], dtype)
    assert codec.datatype_of("y", array) == "BYTES"
    expected = [item.encode() if isinstance(item, str) else item for item in array.tolist()]
    assert codec.decode_raw("y", "BYTES", (2,), codec.encode_raw(array)).tolist() == expected


def test_raw_tensors_are_views_when_aligned_and_copies_when_not() -> None:
    data = np.arange(5, dtype=np.float64).tobytes()
    base = np.frombuffer(data, np.uint8)
    assert np.shares_memory(codec.decode_raw("x", "FP64", (5,), data), base)
    odd = b"." + data
    moved = codec.decode_raw("x", "FP64", (5,), memoryview(odd)[1:])
    assert moved.flags.aligned
    assert moved.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name not in NO_JSON])
@pytest.mark.parametrize("nested", [False, True])
def test_json_data_of_every_datatype(datatype: str, nested: bool) -> None:
    array = sample(datatype)
    values = [item.decode() for item in array.ravel()] if datatype == "BYTES" else array.ravel().tolist()
    data = [values[row * 5 : row * 5 + 5] for row in range(3)] if nested else values
    wire = decode_json(one_input(datatype=datatype, shape=[3, 5], data=data))
    assert same(wire.request.inputs["x"], array)
    body, length = codec_http.encode_response(wire, InferResult(Outcome.ANSWERED, 1, "1", {"y": array}), False)
    assert length is None
    output = json.loads(b"".join(body))["outputs"][0]
    assert (output["datatype"], output["shape"], output["data"]) == (datatype, [3, 5], values)


@pytest.mark.parametrize("datatype", NO_JSON)
def test_datatypes_without_a_json_form(datatype: str) -> None:
    refused(lambda: decode_json(one_input(datatype=datatype)), "'x'", datatype, "binary")
    wire = decode_json(one_input())
    result = InferResult(Outcome.ANSWERED, 1, "1", {"y": sample(datatype)})
    refused(lambda: codec_http.encode_response(wire, result, False), "'y'", datatype, "binary_data")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_outputs_that_json_cannot_carry_are_sent_as_binary_only(value: float) -> None:
    array = np.array([1.0, value], np.float32)
    result = InferResult(Outcome.ANSWERED, 1, "1", {"y": array})
    refused(lambda: codec_http.encode_response(decode_json(one_input()), result, False), "'y'", "binary_data")
    wire = decode_json(one_input() | {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]})
    body, length = codec_http.encode_response(wire, result, False)
    assert b"".join(body)[length:] == array.tobytes()


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"name": 3}, ["$.inputs[0].name", "str"]),
        ({"name": None}, ["`name`"]),
        ({"datatype": "FP31"}, ["'x'", "FP31", "FP32"]),
        ({"datatype": 1}, ["$.inputs[0].datatype"]),
        ({"shape": [-2]}, ["'x'", "negative"]),
        ({"shape": ["2"]}, ["$.inputs[0].shape[0]"]),
        ({"shape": [True]}, ["$.inputs[0].shape[0]", "bool"]),
        ({"shape": [2.0]}, ["$.inputs[0].shape[0]"]),
        ({"shape": 2}, ["$.inputs[0].shape"]),
        ({"shape": None}, ["`shape`"]),
        ({"shape": [2**40, 2**40]}, ["'x'", "elements"]),
        ({"shape": [0, 2**62]}, ["'x'", "elements"]),
        ({"shape": [10**30]}, ["'x'", "elements"]),
        ({"shape": [1] * 40}, ["'x'", "dimensions"]),
        ({"shape": [3]}, ["'x'", "2 elements", "expected 3"]),
        ({"data": [1, "2"]}, ["'x'", "float", "str"]),
        ({"data": [1, True]}, ["'x'", "bool"]),
        ({"data": [1, None]}, ["'x'", "null"]),
        ({"data": {"a": 1}}, ["'x'", "array"]),
        ({"data": "ab"}, ["'x'", "array"]),
        ({"data": [1e39, 0]}, ["'x'", "out of range for FP32"]),
        ({"data": None}, ["'x'", "neither 'data'"]),
        ({"datatype": "INT8", "data": [1, 128]}, ["'x'", "out of range for INT8"]),
        ({"datatype": "UINT64", "data": [1, -1]}, ["'x'", "out of range for UINT64"]),
        ({"datatype": "UINT64", "data": [1, 2**64]}, ["'x'", "out of range for UINT64"]),
        ({"datatype": "INT64", "data": [1, 10**40]}, ["'x'", "out of range for INT64"]),
        ({"datatype": "INT32", "data": [1, 2.5]}, ["'x'", "int", "float"]),
        ({"datatype": "BOOL", "data": [1, 0]}, ["'x'", "bool", "int"]),
        ({"datatype": "BYTES", "data": [1, "a"]}, ["'x'", "str", "int"]),
        ({"shape": [2, 2], "data": [[1, 2], [3]]}, ["'x'", "row of 1", "expected 2"]),
        ({"shape": [2, 2], "data": [[1, 2]]}, ["'x'", "row of 1", "dimension 0"]),
        ({"shape": [2, 2], "data": [[1, 2], 3]}, ["'x'", "array"]),
        ({"shape": [1, 1, 1], "data": [[1]]}, ["'x'", "array"]),
        ({"parameters": {"binary_data_size": 8}}, ["'x'", "both"]),
        ({"data": None, "parameters": {"binary_data_size": 8}}, ["'x'", "Inference-Header-Content-Length"]),
        ({"parameters": {"binary_data_size": -8}}, ["binary_data_size"]),
        ({"parameters": 3}, ["$.inputs[0].parameters"]),
    ],
)
def test_malformed_json_input_names_the_field(changes: dict[str, Any], fragments: list[str]) -> None:
    refused(lambda: decode_json(one_input(**changes)), *fragments)


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (b"", "truncated"),
        (b"[]", "object"),
        (b"{}", "`inputs`"),
        (b'{"inputs": [', "truncated"),
        (b'{"inputs": 3}', "$.inputs"),
        (b'{"inputs": [{"name": "\xff", "datatype": "FP32", "shape": [1], "data": [1]}]}', "UTF-8"),
        (b'{"inputs": [{"name": "\\ud800", "datatype": "FP32", "shape": [1], "data": [1]}]}', "request JSON"),
        (b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["\xff"]}]}', "'x'"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [NaN]}]}', "NaN"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1e999]}]}', "out of range"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [Infinity]}]}', "Infinity"),
        (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "$.inputs[0]"),
        (b'{"inputs": [], "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_malformed_json_text(body: bytes, fragment: str) -> None:
    refused(lambda: decode_json(body), fragment)


@pytest.mark.parametrize("name", ["priority", "timeout"])
@pytest.mark.parametrize("value", [-1, True, 1.5, "3", 10**30, [], None])
def test_priority_and_timeout_are_whole_numbers_in_range(name: str, value: Any) -> None:
    refused(lambda: decode_json(one_input() | {"parameters": {name: value}}), name, "expected")


@pytest.mark.parametrize("name", ["sequence_start", "sequence_end"])
def test_a_sequence_is_refused_where_it_would_begin_or_end(name: str) -> None:
    refused(lambda: decode_json(one_input() | {"parameters": {name: True}}), name, "served models keep no state")
    refused(lambda: decode_json(one_input() | {"parameters": {name: 1}}), name, "expected true or false")
    assert decode_json(one_input() | {"parameters": {name: False, "sequence_id": 3}}).request.model == "m"


def test_parameters_arrive_in_the_request() -> None:
    parameters = {"priority": 2, "timeout": 1500, "binary_data_output": True, "sequence_id": "s", "mine": 1.5}
    outputs = [{"name": "y", "parameters": {"classification": 3}}, {"name": "z", "parameters": {"binary_data": False}}]
    wire = decode_json(one_input() | {"id": "q", "parameters": parameters, "outputs": outputs})
    request = wire.request
    assert (request.model, request.id, request.priority, request.timeout_ns) == ("m", "q", 2, 1_500_000)
    assert request.outputs == ("y", "z")
    assert wire.requested == (RequestedOutput("y", True, 3), RequestedOutput("z", False))
    assert decode_json(one_input() | {"parameters": {"timeout": 0}}).request.timeout_ns is None
    assert decode_json(one_input() | {"parameters": None, "id": None, "outputs": None}).request.id == ""


@pytest.mark.parametrize(
    ("outputs", "fragment"),
    [
        ([{"name": "y"}, {"name": "y"}], "twice"),
        ([{}], "`name`"),
        ([{"name": "y", "parameters": {"classification": 0}}], "classification"),
        ([{"name": "y", "parameters": {"classification": True}}], "classification"),
        ([{"name": "y", "parameters": {"binary_data": 1}}], "binary_data"),
        ([{"name": str(number)} for number in range(300)], "300 outputs"),
    ],
)
def test_malformed_outputs(outputs: Any, fragment: str) -> None:
    refused(lambda: decode_json(one_input() | {"outputs": outputs}), fragment)


def test_shared_memory_is_refused_as_unimplemented() -> None:
    region = {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}}
    refused(lambda: decode_json(one_input(**region)), "shared memory", status=Status.UNIMPLEMENTED)
    asked = one_input() | {"outputs": [{"name": "y"} | region]}
    refused(lambda: decode_json(asked), "shared memory", status=Status.UNIMPLEMENTED)


def test_inputs_given_twice_and_too_many_inputs() -> None:
    tensor = one_input()["inputs"][0]
    refused(lambda: decode_json({"inputs": [tensor, tensor]}), "'x'", "twice")
    many = [tensor | {"name": str(number)} for number in range(LIMITS.max_inputs + 1)]
    refused(lambda: decode_json({"inputs": many}), "257 inputs")


def binary(size: Any, **changes: Any) -> dict[str, Any]:
    return one_input(data=None, parameters={"binary_data_size": size}, **changes)


def test_binary_tensors_follow_the_json_in_order() -> None:
    a, b = np.array([1, 2], np.float32), sample("BYTES", (3,))
    raw_a, raw_b = codec.encode_raw(a), codec.encode_raw(b)
    message = {
        "inputs": [
            binary(len(raw_a))["inputs"][0],
            {"name": "j", "datatype": "INT8", "shape": [1], "data": [5]},
            {"name": "b", "datatype": "BYTES", "shape": [3], "parameters": {"binary_data_size": len(raw_b)}},
        ]
    }
    inputs = decode_json(message, raw_a + raw_b).request.inputs
    assert same(inputs["x"], a)
    assert same(inputs["b"], b)
    assert inputs["j"].tolist() == [5]


@pytest.mark.parametrize(
    ("message", "raw", "fragments"),
    [
        (binary(8), b"1234567", ["'x'", "binary_data_size", "7 bytes"]),
        (binary(8), b"123456789", ["1 surplus bytes"]),
        (binary(4), b"1234", ["'x'", "4 bytes", "expected 8"]),
        (binary(10**30), b"1234", ["binary_data_size"]),
        (binary("8"), b"12345678", ["binary_data_size"]),
        (binary(True), b"1", ["binary_data_size"]),
        (one_input(), b"1", ["surplus"]),
        (binary(2, datatype="BOOL"), b"\x00\x02", ["'x'", "BOOL"]),
        (binary(8, datatype="BYTES"), b"\x01\0\0\0a\0\0\0", ["'x'", "element 1"]),
        (binary(8, datatype="BYTES"), b"\xff\xff\xff\xff\0\0\0\0", ["'x'", "element 0", "4294967295"]),
        (binary(9, datatype="BYTES"), b"\0\0\0\0\0\0\0\0a", ["'x'", "surplus"]),
        (binary(3, datatype="BYTES"), b"\0\0\0", ["'x'", "cannot hold 2"]),
    ],
)
def test_malformed_binary_data(message: dict[str, Any], raw: bytes, fragments: list[str]) -> None:
    refused(lambda: decode_json(message, raw), *fragments)


def test_json_length_beyond_the_body_or_the_limit() -> None:
    refused(lambda: codec_http.decode_request("m", "", b"{}", 3, LIMITS), "Inference-Header-Content-Length", "2 bytes")
    small = Limits(max_json_bytes=10)
    refused(lambda: codec_http.decode_request("m", "", b" " * 11, None, small), "11 bytes", status=Status.TOO_LARGE)
    for text in (b"", b"-1", b"x", b"1.0", b"9" * 30, "²".encode()):
        refused(lambda text=text: codec_http.read_header_length(text), "Inference-Header-Content-Length")


def test_raw_body_for_a_single_input() -> None:
    def decode(spec: TensorSpec, body: bytes, max_batch: int = 0) -> Tensor:
        metadata = ModelMetadata("m", ("1",), "p", (spec,), (), max_batch)
        return codec_http.decode_raw_request(metadata, "", body, LIMITS).request.inputs[spec.name]

    data = np.arange(8, dtype=np.float32).tobytes()
    assert decode(TensorSpec("x", "FP32", (2, 4)), data).shape == (2, 4)
    assert decode(TensorSpec("x", "FP32", (-1, 4)), data).shape == (2, 4)
    assert decode(TensorSpec("x", "FP32", (-1, -1)), data, 8).shape == (1, 8)
    assert decode(TensorSpec("t", "BYTES", (-1, 1)), b"hello").tolist() == [[b"hello"]]
    refused(lambda: decode(TensorSpec("x", "FP32", (-1, -1)), data), "one unknown dimension")
    refused(lambda: decode(TensorSpec("x", "FP32", (-1, 4)), data + b"1"), "'x'", "33 bytes")
    refused(lambda: codec_http.decode_raw_request(MODELS["add_sub"], "", data, LIMITS), "2 inputs")


@pytest.mark.parametrize(("encoding", "pack"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_compression_is_undone_and_bounded(encoding: bytes, pack: Any) -> None:
    limits = Limits(max_body_bytes=1000)
    data = bytes(1000)
    assert decompress(encoding, pack(data), limits) == data
    assert decompress(encoding, codec_http.compress(encoding, data), limits) == data
    bomb = pack(bytes(50_000_000))
    refused(lambda: decompress(encoding, bomb, limits), "1000 bytes", status=Status.TOO_LARGE)
    assert decompress(encoding, pack(bytes(4 << 20)), Limits()) == bytes(4 << 20)
    refused(lambda: decompress(encoding, bomb, Limits()), "the limit for one of", status=Status.TOO_LARGE)
    noise = np.random.default_rng(1).bytes(5 << 20)
    assert decompress(encoding, pack(noise), Limits()) == noise
    refused(lambda: decompress(encoding, pack(data)[:-5], limits), "truncated")
    refused(lambda: decompress(encoding, pack(data) + b"x", limits), "surplus")
    refused(lambda: decompress(encoding, b"no such data", limits), "not valid")
    refused(lambda: decompress(b"br", data, limits), "Content-Encoding", "br")


@pytest.mark.parametrize("seed", range(20))
def test_gzip_of_any_members_is_one_body(seed: int) -> None:
    """RFC 1952: members follow each other, empty ones too; the limit holds for all together."""
    rng = random.Random(seed)
    parts = [rng.randbytes(rng.choice((0, 1, 300, 5000))) for _ in range(rng.randint(1, 40))]
    if seed % 4 == 0:
        parts += [bytes(200_000), b"", rng.randbytes(70_000)]
    packed = [gzip.compress(part, rng.choice((0, 1, 9))) for part in parts]
    data, body = b"".join(parts), b"".join(packed)
    assert decompress(b"gzip", body, Limits(max_body_bytes=len(data))) == data
    if data:
        limits = Limits(max_body_bytes=len(data) - 1)
        refused(lambda: decompress(b"gzip", body, limits), "limit", status=Status.TOO_LARGE)
    limits = Limits()
    refused(lambda: decompress(b"gzip", body[: -rng.randint(1, 7)], limits), "truncated")
    refused(lambda: decompress(b"gzip", body + bytes(rng.randint(1, 3)), limits), "surplus")
    refused(lambda: decompress(b"gzip", body + b"\x1f\x8b\x00junk", limits), "not valid")


def test_inflation_stops_after_each_step_of_bytes_made_or_members_read() -> None:
    assert len(list(codec_http.inflating(b"gzip", gzip.compress(bytes(4 << 20)), LIMITS))) in (3, 4)
    members = gzip.compress(b"") * 5000
    assert len(list(codec_http.inflating(b"gzip", members, LIMITS))) >= 4


def test_members_cost_no_more_than_their_bytes() -> None:
    """zlib copies what lies behind a member: all that is handed over is looked at a few times and no more."""
    handed = 0
    empty = gzip.compress(b"")
    real = zlib.decompressobj

    class Counting:
        def __init__(self, wbits: int) -> None:
            self._machine = real(wbits)

        def decompress(self, piece: Any, most: int) -> bytes:
            nonlocal handed
            handed += len(piece)
            return self._machine.decompress(piece, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._machine, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_http.zlib, "decompressobj", Counting)
        assert decompress(b"gzip", empty * 5000, Limits()) == b""
    assert handed <= 5000 * 1024


def message(datatype: str = "FP32", shape: tuple[int, ...] = (2,), **contents: Any) -> Any:
    request = MESSAGES["ModelInferRequest"](model_name="m")
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(tensor.contents, field).extend(values)
    return request


@pytest.mark.parametrize("datatype", codec_grpc.CONTENTS_FIELD)
def test_grpc_typed_contents(datatype: str) -> None:
    array = sample(datatype)
    request = message(datatype, (3, 5), **{codec_grpc.CONTENTS_FIELD[datatype]: array.ravel().tolist()})
    assert same(codec_grpc.decode_request(request, LIMITS).request.inputs["x"], array)


@pytest.mark.parametrize("datatype", DTYPES)
def test_grpc_raw_contents(datatype: str) -> None:
    array = sample(datatype)
    request = message(datatype, (3, 5))
    request.raw_input_contents.append(codec.encode_raw(array))
    wire = codec_grpc.decode_request(request, LIMITS)
    assert same(wire.request.inputs["x"], array)
    answer = codec_grpc.encode_response(wire, InferResult(Outcome.LATE, 1, "7", {"y": array}), False)
    assert (answer.model_name, answer.model_version) == ("m", "7")
    assert (answer.outputs[0].name, answer.outputs[0].datatype, list(answer.outputs[0].shape)) == (
        "y",
        datatype,
        [3, 5],
    )
    assert answer.raw_output_contents[0] == codec.encode_raw(array)


def test_grpc_malformed_tensors() -> None:
    def check(request: Any, *fragments: str) -> None:
        refused(lambda: codec_grpc.decode_request(request, LIMITS), *fragments)

    check(message(fp32_contents=[1]), "'x'", "1 elements", "expected 2")
    check(message(fp64_contents=[1, 2]), "'x'", "fp64_contents", "expected fp32_contents")
    check(message("INT8", int_contents=[1, 300]), "'x'", "out of range for INT8")
    check(message("UINT16", uint_contents=[1, 70_000]), "'x'", "out of range for UINT16")
    check(message("FP16"), "'x'", "raw_input_contents")
    check(message("FP99"), "FP99")
    check(message(shape=(-1,)), "negative")
    check(message(shape=(2**62, 2**62)), "elements")
    both = message(fp32_contents=[1, 2])
    both.raw_input_contents.append(bytes(8))
    check(both, "'x'", "contents", "raw_input_contents")
    surplus = message()
    surplus.raw_input_contents.extend([bytes(8), bytes(8)])
    check(surplus, "2 tensors", "1 inputs")
    short = message()
    short.raw_input_contents.append(bytes(7))
    check(short, "'x'", "7 bytes", "expected 8")
    for name, kind, value in [
        ("priority", "int64_param", -1),
        ("priority", "string_param", "1"),
        ("timeout", "double_param", float("nan")),
        ("timeout", "bool_param", True),
        ("timeout", "uint64_param", 2**64 - 1),
    ]:
        wrong = message(fp32_contents=[1, 2])
        setattr(wrong.parameters[name], kind, value)
        check(wrong, name, "expected")
    unset = message(fp32_contents=[1, 2])
    unset.parameters["timeout"].SetInParent()
    check(unset, "timeout", "None")


def request_for(name: str, **inputs: Tensor) -> InferRequest:
    return InferRequest(name, inputs)


@pytest.mark.parametrize(
    ("inputs", "outputs", "fragments"),
    [
        ({"a": np.ones((1, 4), np.int32)}, (), ["'b'", "missing", "'a', 'b'"]),
        ({"a": (1, 4), "b": (1, 4), "c": (1, 4)}, (), ["'c'", "unknown", "'a', 'b'"]),
        ({"a": np.ones((1, 4), np.int64), "b": (1, 4)}, (), ["'a'", "INT64", "expected INT32"]),
        ({"a": (1, 5), "b": (1, 4)}, (), ["'a'", "[1, 5]", "[-1, 4]"]),
        ({"a": (4,), "b": (1, 4)}, (), ["'a'", "[4]", "[-1, 4]"]),
        ({"a": (9, 4), "b": (9, 4)}, (), ["'a'", "batch of 9", "1 to 8"]),
        ({"a": (0, 4), "b": (0, 4)}, (), ["'a'", "batch of 0"]),
        ({"a": (1, 4), "b": (1, 4)}, ("sum", "product"), ["'product'", "unknown", "'sum', 'difference'"]),
    ],
)
def test_validate_against_metadata(inputs: dict[str, Any], outputs: tuple[str, ...], fragments: list[str]) -> None:
    arrays = {k: np.ones(v, np.int32) if isinstance(v, tuple) else v for k, v in inputs.items()}
    request = InferRequest("add_sub", arrays, outputs=outputs)
    refused(lambda: codec.validate(request, MODELS["add_sub"]), "'add_sub'", *fragments)


def test_validate_accepts_what_the_model_declares() -> None:
    ones = np.ones((8, 4), np.int32)
    codec.validate(InferRequest("add_sub", {"b": ones, "a": ones}, outputs=("sum",)), MODELS["add_sub"])
    codec.validate(request_for("identity_bf16", x=np.ones((0, 3), ml_dtypes.bfloat16)), MODELS["identity_bf16"])


NUMBERS = [name for name in codec.DTYPES if name not in ("BOOL", "BYTES")]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_classification_is_that_of_a_whole_sort(data: st.DataObject) -> None:
    dtype = codec.DTYPES[data.draw(st.sampled_from(NUMBERS))]
    size, classes = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 50))
    few = [0, 1, 2, 100] if dtype.kind == "u" else [0, 1, -1, -100]
    bounds = [np.iinfo(dtype).min, np.iinfo(dtype).max] if dtype.kind in "iu" else [-0.0, np.inf, -np.inf, np.nan]
    row = np.array(data.draw(st.lists(st.sampled_from(few + bounds), min_size=size, max_size=size)), dtype)
    values = row.astype(np.float32).tolist() if dtype.kind in "fV" and dtype.itemsize == 2 else row.tolist()
    is_nan = [value != value for value in values]
    whole = sorted(range(size), key=lambda at: (is_nan[at], 0 if is_nan[at] else -values[at], at))
    pattern = "%d:%d" if dtype.kind in "iu" else "%f:%d"
    expected = [(pattern % (values[at], at)).encode() for at in whole[:classes]]
    assert codec.classify("y", row, classes, batched=False).tolist() == expected
    rows = codec.classify("y", np.stack([row, row]), classes, batched=True)
    assert rows.tolist() == [expected, expected]


@pytest.mark.parametrize("datatype", DTYPES)
def test_the_load_generator_reads_what_was_answered(datatype: str) -> None:
    text = np.array(["dès 7 h – 日本".encode(), b""], np.object_)
    outputs = {"y": sample(datatype), "text": text, "none": sample(datatype, (0, 2))}
    result = InferResult(Outcome.ANSWERED, 1, "1", outputs)
    for binary in ((), ("y", "none"), ("text",), tuple(outputs)):
        if datatype in NO_JSON and "y" not in binary:
            continue
        wire = WireRequest(InferRequest("m", {}), tuple(RequestedOutput(name, name in binary) for name in outputs))
        body, _ = codec_http.encode_response(wire, result, False)
        found = http_outputs(b"".join(body))
        assert [*found] == [*outputs]
        assert all(same(found[name], outputs[name]) for name in outputs)
    found = grpc_outputs(codec_grpc.encode_response(WireRequest(InferRequest("m", {})), result, False))
    assert [*found] == [*outputs]
    assert all(same(found[name], outputs[name]) for name in outputs)


@pytest.mark.parametrize("datatype", ["BOOL", "INT64", "FP32", "BYTES"])
def test_many_values_are_the_same_json_as_few(datatype: str) -> None:
    array = sample(datatype, (3, 20_000))
    wire = decode_json(one_input())
    [body], _ = codec_http.encode_response(wire, InferResult(Outcome.ANSWERED, 1, "1", {"y": array}), False)
    found = json.loads(body)["outputs"][0]["data"]
    expected = [item.decode() for item in array.ravel()] if datatype == "BYTES" else array.ravel().tolist()
    assert found == expected
    if datatype == "BYTES":
        array[2, 19_999] = b"\xff"
        result = InferResult(Outcome.ANSWERED, 1, "1", {"y": array})
        refused(lambda: codec_http.encode_response(wire, result, False), "'y'", "UTF-8", "binary_data")


def test_classification_sorts_the_best_first() -> None:
    scores = np.array([[0.1, 0.7, 0.7, np.nan], [3, 2, 1, 0]], np.float32)
    best = codec.classify("y", scores, 3, batched=True)
    assert best.tolist() == [
        [b"0.700000:1", b"0.700000:2", b"0.100000:0"],
        [b"3.000000:0", b"2.000000:1", b"1.000000:2"],
    ]
    assert codec.classify("y", scores, 99, batched=True)[0, 3] == b"nan:3"
    assert codec.classify("y", np.array([5, 9], np.uint8), 1, batched=False).tolist() == [b"9:1"]
    assert codec.classify("y", sample("BF16", (6,)), 2, batched=False).shape == (2,)
    refused(lambda: codec.classify("y", sample("BYTES"), 1, False), "'y'", "BYTES")
