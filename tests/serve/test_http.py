"""The HTTP front-end over real sockets."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import re
import socket
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cotenant.errors import CotenantError
from cotenant.serve.frontend.http_routes import Endpoint, Router
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.wire import codec_http
from cotenant.wire.codec import Limits, encode_raw
from fake_backend import CountingBackend, FakeBackend, sample, serving

VECTOR = np.array([[1, 2, 3, 4]], np.float32)
HEADER = "Inference-Header-Content-Length"
LIMITS = Limits(max_malformed=1 << 30, max_body_bytes=1 << 20, max_json_bytes=1 << 19, max_header_bytes=4096)
SHAPE_OF_ALL = {"name", "datatype", "shape"}


class Client:
    def __init__(self, port: int) -> None:
        self.port = port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Make one request; answer the status, the decoded JSON (or the bytes) and the headers in lower case."""
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, data, names)
        response = self._connection.getresponse()
        content: Any = response.read()
        found = {name.lower(): value for name, value in response.getheaders()}
        if found.get("content-type") == "application/json" and "content-encoding" not in found:
            content = json.loads(content)
        return response.status, content, found

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def backend() -> Iterator[CountingBackend]:
    inner = FakeBackend()
    yield CountingBackend(inner)
    inner.close()


@pytest.fixture(scope="module")
def port(backend: CountingBackend) -> Iterator[int]:
    with serving(backend, LIMITS) as ports:
        yield ports.http


@pytest.fixture
def client(port: int) -> Iterator[Client]:
    client = Client(port)
    yield client
    client.close()


def infer_body(values: Any = VECTOR, **extra: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(values.shape), "data": values.ravel().tolist()}
    return {"inputs": [tensor]} | extra


def read_raw(content: bytes, headers: dict[str, str]) -> tuple[dict[str, Any], bytes]:
    length = int(headers[HEADER.lower()])
    return json.loads(content[:length]), content[length:]


def test_health_metadata_and_control(client: Client) -> None:
    assert client("GET", "/v2/health/live")[:2] == (200, {"live": True})
    assert client("GET", "/v2/health/ready/")[:2] == (200, {"ready": True})
    status, server, _ = client("GET", "/v2")
    assert status == 200
    assert server["name"] == "cotenant"
    assert "binary_tensor_data" in server["extensions"]
    assert not any("shared_memory" in name for name in server["extensions"])
    status, model, _ = client("GET", "/v2/models/add_sub/versions/1")
    assert status == 200
    assert (model["name"], model["versions"]) == ("add_sub", ["1"])
    assert [set(tensor) == SHAPE_OF_ALL for tensor in model["inputs"] + model["outputs"]] == [True] * 4
    assert client("GET", "/v2/models/add_sub/config")[1]["max_batch_size"] == 8
    assert client("GET", "/v2/models/add_sub/ready/")[:2] == (200, {"name": "add_sub", "ready": True})
    stats = client("GET", "/v2/models/stats")[1]["model_stats"]
    assert {entry["name"] for entry in stats} >= {"add_sub", "tiny"}
    entry = client("GET", "/v2/models/tiny/versions/1/stats")[1]["model_stats"][0]
    assert entry["version"] == "1"
    assert entry["inference_stats"]["cache_hit"] == {"count": 0, "ns": 0}
    status, page, headers = client("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b"fake_queries" in page


def test_repository(client: Client) -> None:
    everything = client("POST", "/v2/repository/index", b"")[1]
    assert {
        "name": "broken",
        "version": "1",
        "state": "UNAVAILABLE",
        "reason": "model.onnx is no ONNX file",
    } in everything
    assert all(entry["state"] == "READY" for entry in client("POST", "/v2/repository/index", {"ready": True})[1])
    assert client("POST", "/v2/repository/models/tiny/unload", b"")[0] == 200
    try:
        assert client("GET", "/v2/models/tiny/ready")[0] == 503
        status, answer, _ = client("POST", "/v2/models/tiny/infer", infer_body(np.ones((1, 16))))
        assert (status, "not loaded" in answer["error"]) == (503, True)
    finally:
        assert client("POST", "/v2/repository/models/tiny/load", {})[0] == 200
    assert client("GET", "/v2/models/tiny/ready")[0] == 200
    status, answer, _ = client("POST", "/v2/repository/models/tiny/load", {"parameters": {"config": "{}"}})
    assert (status, "model repository" in answer["error"]) == (501, True)
    assert client("POST", "/v2/repository/index", b"[1]")[0] == 400


def test_not_ready_is_503(backend: CountingBackend, client: Client) -> None:
    backend._backend.accepting = False  # type: ignore[attr-defined]
    try:
        status, answer, _ = client("GET", "/v2/health/ready")
        assert (status, "not ready" in answer["error"]) == (503, True)
        assert client("GET", "/v2/health/live")[0] == 200
    finally:
        backend._backend.accepting = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v3", 404),
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/tiny/nothing", 404),
        ("GET", "/v2/models/tiny/versions", 404),
        ("GET", "/v2/models/unknown", 404),
        ("GET", "/v2/models/tiny/versions/9", 404),
        ("GET", "/v2/models/%ff", 400),
        ("GET", "/v2/models/tiny/infer", 405),
        ("POST", "/v2/health/live", 405),
        ("DELETE", "/v2/models/tiny", 405),
        ("GET", "/v2/repository/index", 405),
        ("GET", "/v2/systemsharedmemory/status", 501),
        ("POST", "/v2/systemsharedmemory/region/r/register", 501),
        ("POST", "/v2/cudasharedmemory/unregister", 501),
        ("GET", "/v2/trace/setting", 501),
        ("POST", "/v2/logging", 501),
        ("POST", "/v2/models/unknown/infer", 404),
        ("POST", "/v2/repository/models/unknown/load", 404),
    ],
)
def test_refused_paths_and_methods(client: Client, method: str, path: str, status: int) -> None:
    body = infer_body() if path.endswith("infer") and method == "POST" else None
    found, answer, _ = client(method, path, body)
    assert found == status
    assert set(answer) == {"error"}
    assert len(answer["error"]) > 10


def test_json_inference_echoes_id_and_names(client: Client) -> None:
    status, answer, headers = client("POST", "/v2/models/identity_fp32/infer", infer_body(id="q-7"))
    assert status == 200
    assert answer == {
        "model_name": "identity_fp32",
        "model_version": "1",
        "id": "q-7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}],
    }
    assert HEADER.lower() not in headers
    assert int(headers["x-cotenant-query"]) > 0


@pytest.mark.parametrize("path", ["/v2/models/model%20with%2Fodd%20name/infer", "/v2/models/inline/versions/1/infer/"])
def test_odd_names_trailing_slash_and_answers_before_submit_returns(client: Client, path: str) -> None:
    assert client("POST", path, infer_body())[0] == 200


def test_outputs_come_in_the_order_asked_for(client: Client) -> None:
    ones = np.ones((1, 4), np.int32)
    inputs = [{"name": n, "datatype": "INT32", "shape": [1, 4], "data": ones.tolist()} for n in ("b", "a")]
    outputs = [{"name": "difference", "parameters": {"binary_data": True}}, {"name": "sum"}]
    status, content, headers = client("POST", "/v2/models/add_sub/infer", {"inputs": inputs, "outputs": outputs})
    assert status == 200
    head, raw = read_raw(content, headers)
    assert [output["name"] for output in head["outputs"]] == ["difference", "sum"]
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert head["outputs"][1]["data"] == [2, 2, 2, 2]
    assert raw == bytes(16)
    only = client("POST", "/v2/models/add_sub/infer", {"inputs": inputs, "outputs": [{"name": "sum"}]})[1]
    assert [output["name"] for output in only["outputs"]] == ["sum"]


@pytest.mark.parametrize("rows", [1, 4000])
def test_binary_both_ways_small_and_large(client: Client, rows: int) -> None:
    array = sample("FP32", (rows, 16))
    raw = array.tobytes()
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [rows, 16], "parameters": {"binary_data_size": len(raw)}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    path = "/v2/models/identity_fp32/infer"
    status, content, headers = client("POST", path, head + raw, **{HEADER: str(len(head))})
    assert status == 200
    assert headers["content-type"] == "application/octet-stream"
    assert read_raw(content, headers)[1] == raw


def test_raw_body_for_a_single_input(client: Client) -> None:
    status, content, headers = client("POST", "/v2/models/tiny/infer", bytes(range(128)), **{HEADER: "0"})
    assert status == 200
    head, raw = read_raw(content, headers)
    assert head["outputs"][0]["shape"] == [2, 16]
    assert raw == bytes(range(128))
    assert client("POST", "/v2/models/add_sub/infer", b"1234", **{HEADER: "0"})[0] == 400


def test_classification(client: Client) -> None:
    values = np.zeros((2, 16), np.float32)
    values[0, 3], values[1, 5] = 0.5, 2
    outputs = [{"name": "y", "parameters": {"classification": 1}}]
    status, answer, _ = client("POST", "/v2/models/tiny/infer", infer_body(values, outputs=outputs))
    assert status == 200
    assert answer["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [2, 1], "data": ["0.500000:3", "2.000000:5"]}
    ]


@pytest.mark.parametrize(
    ("encoding", "pack", "unpack"),
    [("gzip", gzip.compress, gzip.decompress), ("deflate", zlib.compress, zlib.decompress)],
)
def test_compression_both_ways(client: Client, encoding: str, pack: Any, unpack: Any) -> None:
    body = pack(json.dumps(infer_body(np.ones((50, 16)))).encode())
    headers = {"Content_Encoding": encoding, "Accept_Encoding": encoding}
    status, content, found = client("POST", "/v2/models/identity_fp32/infer", body, **headers)
    assert (status, found["content-encoding"]) == (200, encoding)
    assert json.loads(unpack(content))["outputs"][0]["shape"] == [50, 16]
    listed = {"Content_Encoding": encoding, "Accept_Encoding": "gzip, deflate, br"}
    assert "content-encoding" not in client("POST", "/v2/models/identity_fp32/infer", body, **listed)[2]
    bomb = pack(bytes(30 << 20))
    status, answer, _ = client("POST", "/v2/models/identity_fp32/infer", bomb, Content_Encoding=encoding)
    assert (status, str(LIMITS.max_body_bytes) in answer["error"]) == (413, True)


def wishes(**parameters: Any) -> list[dict[str, Any]]:
    return [{"name": "y", "parameters": parameters}]


MANY = np.zeros((1, 100_000), np.float32)
WRITING = {
    "classes of many values": (MANY, {"outputs": wishes(classification=3, binary_data=True)}, {}, True),
    "many classes": (MANY[:, :9000], {"outputs": wishes(classification=9000, binary_data=True)}, {}, True),
    "many values as text": (MANY, {}, {}, True),
    "many values compressed": (MANY, {"outputs": wishes(binary_data=True)}, {"Accept_Encoding": "gzip"}, True),
    "many raw values": (MANY, {"outputs": wishes(binary_data=True)}, {}, False),
    "few of all": (VECTOR, {"outputs": wishes(classification=3)}, {"Accept_Encoding": "deflate"}, False),
}


@pytest.mark.parametrize("what", WRITING)
def test_what_takes_long_to_write_holds_no_other_request_up(
    port: int, client: Client, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, wanted, headers, is_long = WRITING[what]
    others_answered = threading.Event()
    threads: list[str] = []
    encode = codec_http.encode_response

    def encode_long(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        assert others_answered.wait(10 if is_long else 0) == is_long
        return encode(*arguments)

    head = {"name": "x", "datatype": "FP32", "shape": list(values.shape)}
    head |= {"parameters": {"binary_data_size": values.nbytes}}
    text = json.dumps({"inputs": [head], **wanted}).encode()
    statuses: list[int] = []

    def ask() -> None:
        body = text + values.tobytes()
        answer = Client(port)("POST", "/v2/models/identity_fp32/infer", body, **{HEADER: str(len(text))}, **headers)
        statuses.append(answer[0])

    monkeypatch.setattr(codec_http, "encode_response", encode_long)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    if is_long:
        assert client("GET", "/v2/health/live")[0] == 200
        others_answered.set()
    asking.join(20)
    assert statuses == [200]
    assert [name == "cotenant-loop" for name in threads] == [not is_long]


@pytest.mark.parametrize(("items", "is_long"), [(1, False), (40_000, True)])
def test_texts_that_take_long_to_check_hold_no_other_request_up(
    backend: CountingBackend, port: int, client: Client, items: int, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_answered = threading.Event()
    threads: list[str] = []
    submit = backend._backend.submit

    def check_long(*arguments: Any) -> int:
        threads.append(threading.current_thread().name)
        assert others_answered.wait(10 if is_long else 0) == is_long
        return submit(*arguments)

    raw = encode_raw(np.full((1, items), b"text", np.object_))
    head = {"name": "x", "datatype": "BYTES", "shape": [1, items], "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [head], "outputs": wishes(binary_data=True)}).encode()
    statuses: list[int] = []

    def ask() -> None:
        headers = {HEADER: str(len(text))}
        statuses.append(Client(port)("POST", "/v2/models/identity_bytes/infer", text + raw, **headers)[0])

    monkeypatch.setattr(backend._backend, "submit", check_long)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    if is_long:
        assert client("GET", "/v2/health/live")[0] == 200
        others_answered.set()
    asking.join(20)
    assert statuses == [200]
    assert [name == "cotenant-loop" for name in threads] == [not is_long]


@pytest.mark.parametrize(
    ("model", "status", "fragment"),
    [
        ("fail", 500, "division by zero"),
        ("drop", 503, "deadline passed"),
        ("reject", 503, "queue of the tenant is full"),
    ],
)
def test_queries_that_end_otherwise(client: Client, model: str, status: int, fragment: str) -> None:
    found, answer, headers = client("POST", f"/v2/models/{model}/infer", infer_body())
    assert (found, fragment in answer["error"]) == (status, True)
    assert int(headers["x-cotenant-query"]) > 0


def test_a_bug_is_logged_and_not_shown(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "cotenant.http"):
        status, answer, _ = client("POST", "/v2/models/crash/infer", infer_body())
    assert status == 500
    assert "secret" not in answer["error"]
    assert "Traceback" not in answer["error"]
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("body", "headers", "status", "fragment"),
    [
        (b"", {}, 400, "request JSON"),
        (b"{}", {HEADER: "x"}, 400, HEADER),
        (b"{}", {HEADER: "3"}, 400, HEADER),
        (b"{}", {HEADER: "-1"}, 400, HEADER),
        (b"{}", {"Content-Encoding": "br"}, 400, "Content-Encoding"),
        (b"{}", {"Content-Encoding": "gzip"}, 400, "gzip"),
        (b" " * ((1 << 19) + 1), {}, 413, "JSON"),
        (b" " * ((1 << 20) + 1), {}, 413, "body"),
    ],
)
def test_malformed_bodies(client: Client, body: bytes, headers: dict[str, str], status: int, fragment: str) -> None:
    found, answer, _ = client("POST", "/v2/models/tiny/infer", body, **headers)
    assert (found, fragment in answer["error"]) == (status, True)
    assert client("GET", "/v2/health/live")[0] == 200


def exchange(port: int, *pieces: bytes) -> bytes:
    """Send raw bytes and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        received = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while piece := connection.recv(65536):
                received += piece
        except ConnectionError:
            pass
        return received


def test_a_body_declared_too_long_is_refused_before_it_is_sent(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(
            b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_chunked_body_is_cut_off_at_the_limit(port: int) -> None:
    chunk = b"40000\r\n" + bytes(0x40000) + b"\r\n"
    head = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head)
        sent = 0
        try:
            while sent < 400:
                connection.sendall(chunk)
                sent += 1
        except ConnectionError:
            pass
    assert sent < 400, "the server went on reading"


def test_a_chunked_body_is_put_together(port: int) -> None:
    body = json.dumps(infer_body()).encode()
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7))
    head = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(port, head, pieces + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"has shape [1, 4], expected [-1, 16]" in answer


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 5000 + b"\r\n\r\n"],
        [b"GET /v2 HTTP/1.1\r\nHost: a\r\n"] + [b"X: " + b"a" * 1000 + b"\r\n"] * 10,
        [b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n"],
    ],
)
def test_headers_beyond_the_limit(port: int, pieces: list[bytes]) -> None:
    answer = exchange(port, *pieces)
    assert not answer or (answer.startswith(b"HTTP/1.1 431 ") and b'{"error":' in answer)
    assert b"200 OK" not in answer


def test_a_large_body_after_small_headers_is_within_the_header_limit(port: int) -> None:
    head = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 400000\r\n\r"
    assert exchange(port, head, b"\n" + bytes(400000)).startswith(b"HTTP/1.1 400 ")


def test_bytes_that_are_no_http(port: int) -> None:
    answer = exchange(port, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":' in answer


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    def request(model: str, last: bool) -> bytes:
        body = json.dumps(infer_body()).encode()
        close = b"Connection: close\r\n" if last else b""
        return b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n%b" % (
            model.encode(),
            len(body),
            close,
            body,
        )

    answer = exchange(port, request("identity_fp32", False) + request("drop", False) + request("inline", True))
    assert answer.count(b"HTTP/1.1 ") == 3
    assert answer.index(b"identity_fp32") < answer.index(b"deadline passed") < answer.index(b'"inline"')


def posted(
    model: str, body: bytes | None = None, *fields: bytes, chunked: bool = False, version: bytes = b"1.1"
) -> bytes:
    body = json.dumps(infer_body()).encode() if body is None else body
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    if chunked:
        body = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 40]), body[i : i + 40]) for i in range(0, len(body), 40))
        body += b"0\r\n\r\n"
    head = b"\r\n".join([b"POST /v2/models/%b/infer HTTP/%b" % (model.encode(), version), b"Host: a", framing, *fields])
    return head + b"\r\n\r\n" + body


UPGRADES = [
    [
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    ],
    [
        b"connection: UPGRADE",
        b"uPGRADE: WebSocket",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        b"Sec-WebSocket-Version: 13",
    ],
    [b"Upgrade: something/7, h2c", b"Connection: keep-alive", b"Connection: upgrade"],
    [b"Upgrade: a", b"Upgrade: b", b"Connection: Upgrade"],
    [b"Upgrade:", b"Connection: Upgrade"],
]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("fields", UPGRADES)
def test_the_body_of_a_request_for_another_protocol_is_its_body(port: int, fields: list[bytes], chunked: bool) -> None:
    smuggled = b"POST /v2/models/drop/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    body = json.dumps(infer_body()).encode()
    both = posted("identity_fp32", None, *fields, chunked=chunked) + posted(
        "inline", smuggled, *fields, chunked=chunked
    )
    last = posted("inline", body, *fields, b"Connection: close", chunked=chunked)
    sent = both + last
    for at in (0, 1, 4, len(sent) // 7, len(sent) // 3, both.index(b"\r\n\r\n") + 4, len(both), len(sent) - 1):
        pieces = [sent[:at], sent[at:]] if at else [sent]
        if at == 1:
            pieces = [sent[i : i + 17] for i in range(0, len(sent), 17)]
        answer = exchange(port, *pieces)
        assert statuses(answer) == [200, 400, 200]
        assert b"drop" not in answer
        assert answer.index(b'"identity_fp32"') < answer.index(b"request JSON") < answer.index(b'"inline"')


def statuses(answer: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


@pytest.mark.parametrize(
    "wish",
    [
        b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n",
        b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST http://[ HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n",
    ],
)
@pytest.mark.parametrize("first", [b"", posted("identity_fp32")])
def test_what_is_refused_ends_the_connection_after_what_was_asked_before(port: int, first: bytes, wish: bytes) -> None:
    answer = exchange(port, first + wish + posted("inline"))
    assert statuses(answer)[:-1] == [200] * bool(first)
    assert statuses(answer)[-1] in (400, 405)
    assert b'"inline"' not in answer


@pytest.mark.parametrize("fields", UPGRADES)
def test_requests_without_a_body_may_ask_for_another_protocol(port: int, fields: list[bytes]) -> None:
    head = b"\r\n".join([b"GET /v2/health/live HTTP/1.1", b"Host: a", *fields])
    answer = exchange(port, head + b"\r\n\r\n" + head + b"\r\nConnection: close\r\n\r\n")
    assert statuses(answer) == [200, 200]
    assert answer.count(b'{"live":true}') == 2


MALFORMED = {
    "head": b"no HTTP at all\r\n\r\n",
    "length": b"POST /v2/models/inline/infer HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    "chunk": b"POST /v2/models/inline/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "unknown path, chunk": b"POST /v9 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "long": b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 5000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("how", MALFORMED)
def test_a_malformed_request_is_answered_after_those_in_progress(backend: CountingBackend, port: int, how: str) -> None:
    inner = backend._backend
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(posted("slow") + posted("slow"))
        inner.slow_arrived.get(timeout=10)  # type: ignore[attr-defined]
        connection.sendall(MALFORMED[how])
        connection.setblocking(False)
        assert Client(port)("POST", "/v2/models/identity_fp32/infer", infer_body())[0] == 200  # the loop goes on
        with pytest.raises(BlockingIOError):
            connection.recv(1)
        connection.settimeout(20)
        inner.release()  # type: ignore[attr-defined]
        received += connection.recv(65536)
        inner.slow_arrived.get(timeout=10)  # type: ignore[attr-defined]
        inner.release()  # type: ignore[attr-defined]
        while piece := connection.recv(65536):
            received += piece
    expected = {"long": 431, "unknown path, chunk": 404}  # the latter is refused before its body
    assert statuses(received) == [200, 200, expected.get(how, 400)]
    assert backend.settled()


def test_a_request_whose_body_turns_out_malformed_gets_one_answer(port: int) -> None:
    head = b"POST /v2/models/inline/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    for pieces in ([head, b"xyz\r\n"], [head + b"xyz\r\n"], [posted("inline") + head, b"xyz\r\n"]):
        answer = exchange(port, *pieces)
        assert statuses(answer)[-1] == 400
        assert len(statuses(answer)) == len(pieces[0].split(b"POST")) - 1


def test_a_client_that_leaves_withdraws_all_that_it_asked_for(backend: CountingBackend, port: int) -> None:
    inner = backend._backend
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(posted("slow"))
        query = inner.slow_arrived.get(timeout=10)  # type: ignore[attr-defined]
        for _ in range(8):
            connection.sendall(posted("slow"))
            assert Client(port)("GET", "/v2/health/live")[0] == 200
    assert inner.cancelled.get(timeout=10) == query  # type: ignore[attr-defined]
    assert inner.slow_arrived.empty()  # type: ignore[attr-defined]
    assert backend.settled()


def test_timeout_parameter_ends_a_waiting_query(client: Client) -> None:
    status, answer, _ = client("POST", "/v2/models/slow/infer", infer_body(parameters={"timeout": 1000}))
    assert (status, "time-out" in answer["error"]) == (503, True)


def test_the_backend_is_told_of_answers_alone(backend: CountingBackend, client: Client) -> None:
    told = [
        int(client("POST", f"/v2/models/{model}/infer", infer_body())[2]["x-cotenant-query"]) in backend.replies
        for model in ("identity_fp32", "inline", "drop", "fail")
    ]
    assert told == [True, True, False, False]


def test_a_client_that_leaves_cancels_its_query(backend: CountingBackend, port: int) -> None:
    inner = backend._backend
    body = json.dumps(infer_body()).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(
            b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        while (query := inner.slow_arrived.get(timeout=10)) not in inner._slow:  # type: ignore[attr-defined]
            pass
    assert inner.cancelled.get(timeout=10) == query  # type: ignore[attr-defined]
    assert backend.settled()


def test_waiting_queries_do_not_block_others(backend: CountingBackend, port: int) -> None:
    inner = backend._backend
    results: list[int] = []
    waiting = threading.Thread(
        target=lambda: results.append(Client(port)("POST", "/v2/models/slow/infer", infer_body())[0]), daemon=True
    )
    waiting.start()
    inner.slow_arrived.get(timeout=10)  # type: ignore[attr-defined]
    assert Client(port)("POST", "/v2/models/identity_fp32/infer", infer_body())[0] == 200
    while waiting.is_alive():
        inner.release()  # type: ignore[attr-defined]
        waiting.join(0.01)
    assert results == [200]


def test_a_taken_port_is_named(port: int) -> None:
    with pytest.raises(CotenantError, match=f"port {port}"):
        HttpServer(FakeBackend(), port=port).start()
    with pytest.raises(CotenantError, match="no such host"):
        HttpServer(FakeBackend(), host="no such host", port=0).start()


def test_stop_cancels_what_still_waits_and_frees_the_port() -> None:
    inner = FakeBackend()
    backend = CountingBackend(inner)
    server = HttpServer(backend, port=0)
    port = server.start()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        body = json.dumps(infer_body()).encode()
        connection.sendall(
            b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        inner.slow_arrived.get(timeout=10)
        server.stop(0.05)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the server is stopping" in answer
    server.stop(0.05)
    assert backend.settled()
    again = HttpServer(backend, port=port)
    assert again.start() == port
    again.stop(0)
    inner.close()


def test_a_large_answer_that_is_being_read_ends_before_the_server_does() -> None:
    inner = FakeBackend()
    server = HttpServer(inner, port=0)
    port = server.start()
    array = np.zeros((4, 1 << 20), np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": list(array.shape)}
    tensor |= {"parameters": {"binary_data_size": array.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    client.request("POST", "/v2/models/identity_fp32/infer", head + array.tobytes(), {HEADER: str(len(head))})
    response = client.getresponse()
    stopping = threading.Thread(target=server.stop, args=[1000], daemon=True)
    stopping.start()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=20).close()
        except ConnectionError:
            break
    assert len(response.read()) > array.nbytes
    client.close()
    stopping.join(20)
    assert not stopping.is_alive()
    inner.close()


def test_router_memory_is_bounded() -> None:
    router = Router()
    for number in range(5000):
        assert router.find(b"/v2/models/m%d/infer" % number) == (Endpoint.INFER, f"m{number}", "")
    assert len(router._known) <= 1024


def test_every_query_ended_once(backend: CountingBackend) -> None:
    assert backend.accepted > 10
    assert backend.settled()
