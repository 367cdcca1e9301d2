"""The HTTP client against a server that writes bytes as a test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from cotenant.load import LoadError
from cotenant.load.http import HttpPool
from load_fakes import in_loop

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSE = b"close the connection"
MUTE = b"say nothing"


class Script:
    """Plays one list of answers per connection; `heard` keeps the requests, per connection."""

    def __init__(self, connections: Sequence[Sequence[bytes]]) -> None:
        self._connections = list(connections)
        self.heard: list[list[bytes]] = []

    async def play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: list[bytes] = []
        answers = self._connections[len(self.heard)]
        self.heard.append(mine)
        for answer in answers:
            if answer is CLOSE:
                break
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
            mine.append(head + await reader.readexactly(int(length or 0)))
            if answer is not MUTE:
                writer.write(answer)
        else:
            await reader.read()
        writer.close()


@asynccontextmanager
async def scripted(*connections: Sequence[bytes]) -> AsyncIterator[tuple[HttpPool, Script]]:
    script = Script(connections)
    server = await asyncio.start_server(script.play, "127.0.0.1", 0)
    pool = HttpPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/")
    try:
        yield pool, script
    finally:
        pool.close()
        server.close()
        await server.wait_closed()


@in_loop
async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with scripted([OK, OK]) as (pool, script):
        message = pool.prepare("POST", "/v2/x", {"A": "b"}, b"body")
        assert await pool.request(message, 10) == (200, b"ok")
        assert await pool.request(message, 10) == (200, b"ok")
    assert len(script.heard) == 1
    head, _, body = script.heard[0][1].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v2/x HTTP/1.1"
    assert {b"A: b", b"Content-Length: 4"} <= set(lines)
    assert body == b"body"


@in_loop
async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async with scripted([OK], [OK], [OK]) as (pool, script):
        message = pool.prepare("GET", "/")
        answers = await asyncio.gather(*(pool.request(message, 10) for _ in range(3)))
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert [len(heard) for heard in script.heard] == [1, 1, 1]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
    ],
)
@in_loop
async def test_a_connection_that_the_server_will_close_is_not_kept(answer: bytes) -> None:
    async with scripted([answer], [OK]) as (pool, script):
        assert await pool.request(pool.prepare("GET", "/"), 10) == (200, b"ok")
        assert await pool.request(pool.prepare("GET", "/"), 10) == (200, b"ok")
    assert len(script.heard) == 2


@in_loop
async def test_a_kept_connection_that_breaks_before_the_answer_is_replaced_once() -> None:
    async with scripted([OK, MUTE, CLOSE], [OK]) as (pool, script):
        await pool.request(pool.prepare("GET", "/"), 10)
        assert (await pool.request(pool.prepare("GET", "/"), 10)).status == 200
    assert [len(heard) for heard in script.heard] == [2, 1]


@in_loop
async def test_an_answer_cut_short_is_an_error_and_not_asked_for_again() -> None:
    async with scripted([OK, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", CLOSE]) as (pool, script):
        await pool.request(pool.prepare("GET", "/"), 10)
        with pytest.raises(ConnectionError):
            await pool.request(pool.prepare("GET", "/"), 10)
    assert [len(heard) for heard in script.heard] == [2]


@in_loop
async def test_what_is_not_http_is_an_error() -> None:
    async with scripted([b"hello\r\n\r\n"]) as (pool, _):
        with pytest.raises(ConnectionError, match="not HTTP"):
            await pool.request(pool.prepare("GET", "/"), 10)


@in_loop
async def test_after_a_time_out_nobody_gets_the_stale_answer() -> None:
    async with scripted([MUTE], [OK]) as (pool, script):
        with pytest.raises(TimeoutError):
            await pool.request(pool.prepare("GET", "/"), 0.01)
        assert (await pool.request(pool.prepare("GET", "/"), 10)).status == 200
    assert len(script.heard) == 2


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_a_wrong_address_is_said(url: str) -> None:
    with pytest.raises(LoadError, match="expected one like"):
        HttpPool(url)


def test_a_bare_host_and_port_is_taken_as_http() -> None:
    assert b"\r\nHost: localhost:8000\r\n" in HttpPool("localhost:8000").prepare("GET", "/")
