"""Heads and chunks against llhttp, which is asked for whole messages; and connections that take too long."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any

import pytest
from httptools import HttpParserError, HttpRequestParser
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.serve.frontend.http_chunks import ChunkedBody
from cotenant.serve.frontend.http_connection import Answer, Connections, Exchange, HttpConnection
from cotenant.serve.frontend.http_head import CHUNKED, BadRequestError, Head, HeadParser, parse_head
from cotenant.serve.frontend.pending_bytes import Held
from cotenant.wire.api import ServeError
from cotenant.wire.codec import Limits

CHUNKS = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT = 1 << 16
CHUNKED_FIELDS = ((b"transfer-encoding", b"chunked"), (b"connection", b"close"))
DAMAGE = (b"", b"\n", b"\r", b"g", b"\0", b"-", b";")


def by_llhttp(data: bytes) -> bytes | None:
    """The body of a request in chunks; None where it is malformed, or not complete."""
    parts: list[bytes] = []
    ends: list[int] = []

    class Fields:
        def on_body(self, body: bytes) -> None:
            parts.append(body)

        def on_message_complete(self) -> None:
            ends.append(len(parts))

    try:
        HttpRequestParser(Fields()).feed_data(CHUNKS + data)
    except HttpParserError:
        return None
    return b"".join(parts) if ends else None


def by_us(data: bytes, cuts: list[int]) -> bytes | None:
    """The same, with the bytes coming in pieces."""
    body, left = ChunkedBody(LIMIT, LIMIT), b""
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        left += data[begin:end]
        try:
            left = left[body.feed(left, 0) :]
        except BadRequestError:
            return None
    assert not (body.is_complete and left), "bytes behind the body were sent"
    return bytes(body.body) if body.is_complete else None


SIZES = st.sampled_from([b"%x", b"%X", b"0%x", b"%x;a", b'%x;a="b"', b"%x;a=b;c"])
GOOD = st.lists(st.tuples(st.binary(min_size=1, max_size=40), SIZES), max_size=5)
TRAILERS = st.lists(st.sampled_from([b"a: b\r\n", b"X-Sum:1\r\n", b"c:\r\n"]), max_size=2)
SEEN: Counter[str] = Counter()


def written(chunks: list[tuple[bytes, bytes]], trailers: list[bytes]) -> bytes:
    frames = [form % len(piece) + b"\r\n" + piece + b"\r\n" for piece, form in chunks]
    return b"".join([*frames, b"0\r\n", *trailers, b"\r\n"])


@settings(max_examples=400, deadline=None)
@given(GOOD, TRAILERS, st.data())
def test_bodies_in_chunks_are_what_llhttp_makes_of_them(
    chunks: list[tuple[bytes, bytes]], trailers: list[bytes], data: st.DataObject
) -> None:
    sent = written(chunks, trailers)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=4)))
    body = b"".join(piece for piece, _ in chunks)
    assert by_llhttp(sent) == by_us(sent, cuts) == body


@settings(max_examples=600, deadline=None, derandomize=True)
@given(GOOD, TRAILERS, st.data())
def test_damaged_bodies_are_never_taken_for_more_than_llhttp_takes(
    chunks: list[tuple[bytes, bytes]], trailers: list[bytes], data: st.DataObject
) -> None:
    """We may refuse what llhttp takes, and never the other way round: both then see the same end of the message."""
    sent = bytearray(written(chunks, trailers))
    at = data.draw(st.integers(0, len(sent) - 1))
    sent[at : at + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from(DAMAGE))
    mine = ChunkedBody(LIMIT, LIMIT)
    try:
        end = mine.feed(bytes(sent), 0)
    except BadRequestError:
        SEEN["refused"] += 1
        return
    if not mine.is_complete:
        SEEN["incomplete"] += 1
        return
    SEEN["taken"] += 1
    assert by_llhttp(bytes(sent[:end])) == bytes(mine.body)


def test_all_kinds_of_damage_were_met() -> None:
    assert min(SEEN["refused"], SEEN["incomplete"], SEEN["taken"]) > 5, SEEN


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (b"GET /v2?a=b#c HTTP/1.1\r\nHost: a\r\n", Head("GET", b"/v2", ((b"host", b"a"),), 0, True, False, False)),
        (
            b"GET http://a:80/v2/x HTTP/1.1\r\nHost: a\r\n",
            Head("GET", b"/v2/x", ((b"host", b"a"),), 0, True, False, False),
        ),
        (b"GET / HTTP/1.0\r\n", Head("GET", b"/", (), 0, False, False, True)),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 7\r\nEXPECT: 100-Continue\r\n",
            Head("POST", b"/", ((b"content-length", b"7"), (b"expect", b"100-Continue")), 7, True, True, False),
        ),
        (
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n",
            Head(
                "POST",
                b"/",
                ((b"transfer-encoding", b"chunked"), (b"connection", b"close")),
                CHUNKED,
                False,
                False,
                False,
            ),
        ),
    ],
)
def test_heads(lines: bytes, expected: Head) -> None:
    parser = HeadParser()
    assert parser.parse(lines + b"\r\n") == expected
    assert parser.parse(lines + b"\r\n") is parser.parse(lines + b"\r\n")


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"GET\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n",
        b"GET / HTTP/1.1\r\n folded: a\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: +1\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, gzip\r\n",
        b"GET / HTTP/1.1\nHost: a\n",
        b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n",
        b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n",
    ],
)
def test_heads_that_are_refused(lines: bytes) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_head(lines + b"\r\n")
    assert caught.value.status in (400, 405)


def test_the_memory_of_heads_is_bounded() -> None:
    parser = HeadParser()
    for number in range(3000):
        parser.parse(b"GET /%d HTTP/1.1\r\n\r\n" % number)
    parser.parse(b"GET /%b HTTP/1.1\r\n\r\n" % (b"a" * 5000))
    assert len(parser._known) <= 1024
    assert max(map(len, parser._known)) < 100


# --- time -------------------------------------------------------------------------------------------------------------


class SilentApp:
    """Leaves every request unanswered until it is told otherwise."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def begun(self, head: Head, arrival_ns: int) -> Answer | Held | None:
        return None

    def no_room(self, head: Head, arrival_ns: int, error: ServeError) -> Answer:
        raise AssertionError

    def request(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    def stopping(self) -> Answer:
        return Answer(503, b"text/plain", b"")

    def malformed(self, status: int, message: str) -> Answer:
        return Answer(status, b"text/plain", message.encode())


class Pipe:
    """A transport that keeps what is written. `unread` is what the client has not taken of it."""

    def __init__(self) -> None:
        self.written = b""
        self.unread = 0
        self.ended = ""
        self._socket = socket.socket()

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else self._socket

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, pieces: list[bytes]) -> None:
        self.written += b"".join(pieces)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = self.ended or "eof"

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = self.ended or "close"

    def abort(self) -> None:
        self.ended = "abort"

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Rig:
    """A connection over a pipe, and a clock that is told the time."""

    def __init__(self) -> None:
        self.app, self.pipe = SilentApp(), Pipe()
        limits = Limits(max_head_s=10, max_body_s=20, max_unread_s=60, max_body_bytes=1 << 20)
        self.connection = HttpConnection(Connections(self.app, limits))
        self.connection.connection_made(self.pipe)
        self.begin_s = asyncio.get_running_loop().time()

    def receive(self, data: bytes) -> None:
        while data:
            room = self.connection.get_buffer(-1)
            taken = min(len(room), len(data))
            room[:taken] = data[:taken]
            self.connection.buffer_updated(taken)
            data = data[taken:]

    def after(self, seconds: float) -> str:
        """What became of the connection by then."""
        self.connection.check_timeouts(self.begin_s + seconds)
        return self.pipe.ended


def in_loop(test: Any) -> Any:
    def run() -> None:
        async def body() -> None:
            test(Rig())

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


@in_loop
def test_an_idle_connection_is_closed_without_a_word(rig: Rig) -> None:
    assert (rig.after(60), rig.after(70), rig.pipe.written) == ("", "close", b"")


@in_loop
def test_a_head_that_does_not_come_is_told_so(rig: Rig) -> None:
    rig.receive(b"GET /v2 HTTP/1.1\r\nHost:")
    assert (rig.after(9), rig.after(11)) == ("", "eof")
    assert rig.pipe.written.startswith(b"HTTP/1.1 408 ")


@in_loop
def test_a_body_has_to_come_at_some_speed(rig: Rig) -> None:
    rig.receive(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + bytes(50 << 10))
    assert (rig.after(21), rig.after(69), rig.after(72)) == ("", "", "eof")  # 20 s, and one for each KiB
    assert rig.pipe.written.startswith(b"HTTP/1.1 408 ")


@in_loop
def test_a_body_in_chunks_has_to_come_too(rig: Rig) -> None:
    rig.receive(CHUNKS + b"5\r\nabc")
    assert (rig.after(19), rig.after(21)) == ("", "eof")


@in_loop
def test_a_request_in_progress_may_last(rig: Rig) -> None:
    rig.receive(b"GET / HTTP/1.1\r\n\r\n")
    assert rig.after(10_000) == ""
    [exchange] = rig.app.exchanges
    exchange.answer(Answer(200, b"text/plain", b"late"))
    assert rig.pipe.written.endswith(b"late")


@in_loop
def test_an_answer_that_nobody_reads_ends_the_connection(rig: Rig) -> None:
    rig.receive(b"GET / HTTP/1.1\r\n\r\n")
    rig.app.exchanges[0].answer(Answer(200, b"text/plain", bytes(100)))
    rig.pipe.unread = 1000
    assert rig.after(10) == ""
    rig.pipe.unread = 900  # something was read
    assert (rig.after(65), rig.after(120)) == ("", "")
    assert rig.after(126) == "abort"


@in_loop
def test_nothing_more_is_answered_while_the_client_does_not_read(rig: Rig) -> None:
    rig.connection.pause_writing()
    rig.receive(b"GET / HTTP/1.1\r\n\r\n" * 3)
    assert not rig.app.exchanges
    rig.connection.resume_writing()
    assert len(rig.app.exchanges) == 1


@in_loop
def test_a_client_that_goes_away_is_told_of_once_and_its_answer_goes_nowhere(rig: Rig) -> None:
    rig.receive(b"GET / HTTP/1.1\r\n\r\n")
    [exchange] = rig.app.exchanges
    gone: list[int] = []
    exchange.on_gone = lambda: gone.append(1)
    rig.connection.connection_lost(None)
    exchange.answer(Answer(200, b"text/plain", b"late"))
    assert (gone, rig.pipe.written, exchange.is_over) == ([1], b"", True)
