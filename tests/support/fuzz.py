"""Damaged requests of both protocols, and what a server may say of them."""

from __future__ import annotations

import copy
import json
import random
import socket
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from cotenant.wire.codec import Limits
from fake_backend import CountingBackend

LIMITS = Limits(max_malformed=1 << 30, max_body_bytes=1 << 16, max_header_bytes=8192)
CLEAN_STATUSES = {200, 400, 404, 405, 413, 431, 499, 501, 503}
CLEAN_CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}


@dataclass(frozen=True)
class Target:
    """A backend and a request that it answers: inputs by name with datatype and array."""

    backend: CountingBackend
    model: str
    inputs: dict[str, tuple[str, np.ndarray[Any, np.dtype[Any]]]]


ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    10**40,
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "\x00",
    "ü\u2028",
    [],
    [[]],
    [1, [2]],
    {},
    {"a": 1},
    "FP32",
    "BYTES",
    "BF16",
    [-1],
    [2**62, 4],
    [0],
    "a" * 300,
]
ODD_TEXTS = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b'"\\ud800"',
    b'"\xff"',
    b"[" * 2000,
    b"01",
    b"'a'",
    b"",
    b"9" * 5000,
]
ODD_HEADERS = [
    (b"Inference-Header-Content-Length", b"-1"),
    (b"Inference-Header-Content-Length", b"0"),
    (b"Inference-Header-Content-Length", b"1e3"),
    (b"Inference-Header-Content-Length", b"99999999999999999999"),
    (b"Inference-Header-Content-Length", b"\xff\xfe"),
    (b"Content-Encoding", b"gzip"),
    (b"Content-Encoding", b"deflate"),
    (b"Content-Encoding", b"br, \xff"),
    (b"Accept-Encoding", b"gzip"),
    (b"Accept-Encoding", b"\x80"),
    (b"Content-Type", b"application/octet-stream"),
    (b"Expect", b"100-continue"),
    (b"Connection", b"close"),
    (b"Connection", b"Upgrade"),
    (b"Connection", b"keep-alive, upgrade"),
    (b"Upgrade", b"websocket"),
    (b"Upgrade", b"h2c"),
]


def json_message(target: Target, binary: bool) -> tuple[dict[str, Any], bytes]:
    inputs, raw = [], b""
    for name, (datatype, array) in target.inputs.items():
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if binary:
            entry["parameters"] = {"binary_data_size": array.nbytes}
            raw += array.tobytes()
        else:
            entry["data"] = array.tolist()
        inputs.append(entry)
    parameters = {"binary_data_output": binary, "priority": 1, "timeout": 60_000_000}
    return {"id": "q", "inputs": inputs, "parameters": parameters}, raw


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(value, key) for key, _ in items]
    for _, inner in items if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(inner)
    return found


def mutate_json(rng: random.Random, message: dict[str, Any]) -> None:
    container, key = rng.choice(places(message))
    match rng.randrange(5):
        case 0:
            del container[key]
        case 1 if isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        case 2 if isinstance(container, dict):
            container[rng.choice(["data", "parameters", "shape", "classification", "timeout", "zzz"])] = container.pop(
                key
            )
        case _:
            container[key] = copy.deepcopy(rng.choice(ODD_VALUES))


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    match rng.randrange(4):
        case 0:
            del changed[rng.randrange(len(changed) + 1) :]
        case 1:
            start = rng.randrange(len(changed) + 1)
            changed[start:start] = rng.choice(ODD_TEXTS)
        case _:
            for _ in range(rng.randint(1, 8)):
                if changed:
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def http_request(rng: random.Random, target: Target, damage: bool = True) -> bytes:
    message, raw = json_message(target, rng.random() < 0.5)
    path = f"/v2/models/{target.model}/infer".encode()
    headers: list[tuple[bytes, bytes]] = [(b"Host", b"localhost")]
    kind = rng.randrange(5) if damage else -1
    if kind == 0:
        for _ in range(rng.randint(1, 3)):
            mutate_json(rng, message)
    head = json.dumps(message).encode()
    if kind == 1:
        head = mutate_bytes(rng, head)
    if kind == 2 and raw:
        raw = mutate_bytes(rng, raw)
    if raw or rng.random() < 0.2:
        headers.append(
            (b"Inference-Header-Content-Length", b"%d" % (len(head) + (rng.randint(-9, 9) if kind == 2 else 0)))
        )
    body = head + raw
    if kind == 3:
        headers += rng.sample(ODD_HEADERS, rng.randint(1, 3))
    if kind == 4:
        path = mutate_bytes(rng, path).replace(b" ", b"").replace(b"\n", b"").replace(b"\r", b"")
    headers.append((b"Content-Length", b"%d" % len(body)))
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"POST %b HTTP/1.1\r\n%b\r\n%b" % (path, lines, body)


class RawHttp:
    """A keep-alive connection that sends bytes as they are and reconnects when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def __call__(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and read one answer; a hang is a TimeoutError. Status 0: closed without an answer."""
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=10)
        try:
            self._socket.sendall(request)
            return self._read(self._socket)
        except ConnectionError:
            self.close()
            return 0, b""

    def _read(self, connection: socket.socket) -> tuple[int, bytes]:
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                piece = connection.recv(65536)
                if not piece:
                    self.close()
                    return 0, data
                data += piece
            head, _, rest = data.partition(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status != 100:
                break
            data = rest
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields[b"content-length"])
        while len(rest) < length:
            piece = connection.recv(65536)
            if not piece:
                raise AssertionError("the answer is shorter than its Content-Length")
            rest += piece
        if fields.get(b"connection") == b"close":
            self.close()
        return status, rest

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def grpc_message(target: Target) -> Any:
    message = service_pb2.ModelInferRequest(model_name=target.model, id="q")
    for name, (datatype, array) in target.inputs.items():
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    message.parameters["priority"].int64_param = 1
    return message


def set_parameter(rng: random.Random, parameters: Any) -> None:
    name = rng.choice(["priority", "timeout", "classification", "shared_memory_region", "binary_data", "zzz"])
    kind, value = rng.choice(
        [
            ("int64_param", -1),
            ("int64_param", 2**62),
            ("uint64_param", 2**64 - 1),
            ("double_param", float("nan")),
            ("bool_param", True),
            ("string_param", "1"),
        ]
    )
    setattr(parameters[name], kind, value)


def mutate_message(rng: random.Random, message: Any) -> None:
    tensor = rng.choice(message.inputs) if message.inputs else message.inputs.add()
    match rng.randrange(12):
        case 0:
            tensor.name = rng.choice(["", "zzz", "a", "ü" * 100])
        case 1:
            tensor.datatype = rng.choice(["", "FP16", "BF16", "BYTES", "BOOL", "int32", "INT64"])
        case 2:
            tensor.shape.append(rng.choice([-1, 0, 1, 2**31, 2**62]))
        case 3:
            del tensor.shape[:]
        case 4:
            message.inputs.add().CopyFrom(tensor)
        case 5:
            message.raw_input_contents.append(b"\x01" * rng.randint(0, 40))
        case 6:
            del message.raw_input_contents[rng.randrange(2) :]
        case 7:
            if message.raw_input_contents:
                index = rng.randrange(len(message.raw_input_contents))
                message.raw_input_contents[index] = mutate_bytes(rng, message.raw_input_contents[index])
        case 8:
            tensor.contents.int_contents.extend([1] * rng.choice([0, 8]))
        case 9:
            set_parameter(rng, rng.choice([message.parameters, tensor.parameters]))
        case 10:
            output = message.outputs.add(name=rng.choice(["sum", "zzz", ""]))
            if rng.random() < 0.5:
                set_parameter(rng, output.parameters)
        case 11:
            message.model_name, message.model_version = rng.choice([("", ""), ("zzz", ""), (target_name(message), "9")])


def target_name(message: Any) -> str:
    name: str = message.model_name
    return name


def grpc_request(rng: random.Random, target: Target) -> bytes:
    message = grpc_message(target)
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            mutate_message(rng, message)
        data: bytes = message.SerializeToString()
        return data
    return mutate_bytes(rng, message.SerializeToString())


def grpc_outcome(call: Any, data: bytes) -> tuple[grpc.StatusCode, str]:
    try:
        call(data, timeout=10)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""
