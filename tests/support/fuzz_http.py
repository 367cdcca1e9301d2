"""HTTP requests with damaged heads, frames and bodies, between two good ones on one connection."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fuzz import ODD_HEADERS, ODD_TEXTS, mutate_bytes, mutate_json

WAIT_S = 60.0
MODEL = "add_sub"
_LINE = b"\r\n"
_FRAMES = [
    b"Content-Length: 0",
    b"Content-Length: 7",
    b"Content-Length: -1",
    b"Content-Length: +5",
    b"Content-Length: 0x10",
    b"Content-Length: 5, 5",
    b"Content-Length: 99999999999999999999999",
    b"Content-Length: 1000000",
    b"Content-Length:",
    b"Content-Length: 12 3",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding : chunked",
    b"transfer-encoding:\tchunked",
    b"Trailer: X-1",
]
_LINES = [
    b"",
    b"no colon",
    b": no name",
    b" folded: line",
    b"X-\x00: nul",
    b"X: \x00",
    b"X: \xff\xfe",
    b"X: " + b"y" * 9000,
    b"Host: another",
    b"X: a\nY: b",
    b"X: a\rY: b",
    b"HTTP/1.1 200 OK",
    b"GET / HTTP/1.1",
]
_METHODS = [
    b"GET",
    b"HEAD",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"PRI",
    b"post",
    b"M-SEARCH",
    b"",
    b"POSTPOST",
]
_VERSIONS = [
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/1.2",
    b"HTTP/2.0",
    b"HTTP/1.1 ",
    b"HTTP/1,1",
    b"http/1.1",
    b"",
    b"HTTP/11",
]
_TARGETS = [
    b"*",
    b"/",
    b"//v2",
    b"http://a/v2/models/add_sub/infer",
    b"http://[",
    b"/v2/models/add_sub/infer?x=1",
    b"/v2/models/add_sub/infer#x",
    b"/v2/models/%00/infer",
    b"/v2/models/%ff/infer",
    b"/v2/models/%zz/infer",
    b"/v2/models/add_sub/../add_sub/infer",
    b"/v2/health/live",
    b"/metrics",
    b"/v2/models/stats",
    b"/v2/repository/index",
    b"/" + b"a" * 9000,
    b"/\xc3\xa4",
]
_CHUNKS = [
    b"5\r\nabcd\r\n",
    b"-1\r\n\r\n",
    b"ffffffffffffffff\r\nx\r\n",
    b"1ffffffffffffffff\r\nx\r\n",
    b"0x1\r\nx\r\n",
    b"zz\r\n",
    b"1 \r\nx\r\n",
    b'1;a="b\r\nc"\r\nx\r\n',
    b"1\nx\n",
    b"\r\n",
]


def numbers_of(number: int) -> list[int]:
    """The inputs `a` of a request; `b` is all ones."""
    return [number, number + 1, number + 2, number + 3]


def message(number: int, name: str = "") -> dict[str, Any]:
    def tensor(name: str, values: list[int]) -> dict[str, Any]:
        return {"name": name, "datatype": "INT32", "shape": [1, 4], "data": values}

    inputs = [tensor("a", numbers_of(number)), tensor("b", [1] * 4)]
    return {"id": name or str(number), "inputs": inputs}


def good(number: int) -> bytes:
    """A request that is answered with the numbers of its own."""
    return _joined([b"POST /v2/models/add_sub/infer HTTP/1.1", b"Host: a"], json.dumps(message(number)).encode())


def _joined(lines: list[bytes], body: bytes) -> bytes:
    return _LINE.join([*lines, b"Content-Length: %d" % len(body), b"", b""]) + body


def damaged(rng: random.Random) -> bytes:
    """A request called "m" with one to three damages."""
    asked = message(7_000_000, "m")
    first = [b"POST", b"/v2/models/add_sub/infer", b"HTTP/1.1"]
    fields = [b"Host: a"]
    kinds = {rng.randrange(9) for _ in range(rng.choice((1, 1, 2, 3)))}
    if 0 in kinds:
        mutate_json(rng, asked)
    body = json.dumps(asked).encode()
    if 1 in kinds:
        body = mutate_bytes(rng, body)
    if 2 in kinds:
        first[0] = rng.choice(_METHODS)
    if 3 in kinds:
        first[1] = rng.choice(_TARGETS)
    if 4 in kinds:
        first[2] = rng.choice(_VERSIONS)
    if 5 in kinds:
        fields += [b"%b: %b" % each for each in rng.sample(ODD_HEADERS, rng.randint(1, 3))]
    if rng.random() < 0.35:
        framing, body = b"Transfer-Encoding: chunked", _chunked(rng, body, is_damaged=6 in kinds)
    else:
        length = len(body) + (rng.choice((-9, -1, 1, 9, 200)) if 6 in kinds else 0)
        framing = b"Content-Length: %d" % max(0, length)
    fields.insert(rng.randint(0, len(fields)), framing)
    if 7 in kinds:
        fields.insert(rng.randint(0, len(fields)), rng.choice(_FRAMES + _LINES))
    head = _LINE.join([b" ".join(first), *fields, b"", b""])
    if 8 in kinds:
        head = mutate_bytes(rng, head)
    return head + body


def _chunked(rng: random.Random, body: bytes, *, is_damaged: bool) -> bytes:
    chunks, at = [], 0
    while at < len(body):
        piece = body[at : at + rng.choice((1, 7, 60, 1000))]
        at += len(piece)
        size = b"%X" if rng.random() < 0.2 else b"%x"
        chunks.append(size % len(piece) + rng.choice((b"", b"", b";a=b", b"; x")) + _LINE + piece + _LINE)
    if is_damaged:
        match rng.randrange(4):
            case 0:
                chunks.insert(rng.randint(0, len(chunks)), rng.choice(_CHUNKS))
            case 1:
                chunks.insert(rng.randint(0, len(chunks)), rng.choice(ODD_TEXTS))
            case 2:
                chunks = chunks[: rng.randint(0, len(chunks))]
            case _:
                chunks.append(b"0;" + b"e" * 9000 + _LINE)
    trailers = rng.choice((b"", b"", b"X-1: v\r\n", b"Expect: 100-continue\r\n", b"T: v\r\n" * 1500))
    return b"".join(chunks) + b"0\r\n" + trailers + _LINE


@dataclass
class Exchange:
    """The answers on a connection. `is_open`: it accepts further requests."""

    answers: list[tuple[int, dict[bytes, bytes], bytes]] = field(default_factory=list)
    is_open: bool = True


def exchange(
    connection: socket.socket, rng: random.Random, requests: bytes, count: int, is_waiting: Callable[[], bool]
) -> Exchange:
    """Send requests in chunks and read their answers: `count` of them, or until the server closes the connection.

    With `is_waiting` it waits for an answer that will not come."""
    found, received, at = Exchange(), b"", 0
    connection.settimeout(WAIT_S)
    try:
        while at < len(requests):
            size = rng.choice((1, 90, 700, 70_000, 70_000, 70_000))
            connection.sendall(requests[at : at + size])
            at += size
    except OSError:
        pass
    connection.settimeout(0.02)
    while True:
        received = _read(received, found.answers)
        if len(found.answers) >= count and not received and found.answers[-1][1].get(b"connection") != b"close":
            return found
        is_idle = is_waiting()  # before it reads: answers written by then are read
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError:
            if is_idle:
                found.is_open = False
                return found
            continue
        except ConnectionResetError:
            piece = b""
        if not piece:
            _read(received, found.answers, is_all=True)
            found.is_open = False
            return found
        received += piece


def _read(received: bytes, answers: list[tuple[int, dict[bytes, bytes], bytes]], *, is_all: bool = False) -> bytes:
    while b"\r\n\r\n" in received:
        head, _, rest = received.partition(b"\r\n\r\n")
        lines = head.split(_LINE)
        assert lines[0].startswith(b"HTTP/1.1 "), received
        status = int(lines[0].split(b" ")[1])
        if status == 100:
            received = rest
            continue
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        length = int(fields[b"content-length"])
        is_bare = length > 0 and (rest.startswith(b"HTTP/1.1 ") or (is_all and not rest))  # of HEAD
        if not is_bare and len(rest) < length:
            return received
        answers.append((status, fields, b"" if is_bare else rest[:length]))
        received = rest if is_bare else rest[length:]
    return received
