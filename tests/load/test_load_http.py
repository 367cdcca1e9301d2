"""The HTTP client against a server that writes bytes as a test tells it."""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest

from cotenant.load import LoadError, run_load
from cotenant.load.http import HttpPool
from cotenant.workload import TenantLoad, Trace, Workload
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
        assert (await pool.request(message, 10))[:2] == (200, b"ok")
        assert (await pool.request(message, 10))[:2] == (200, b"ok")
    assert len(script.heard) == 1
    head, _, body = script.heard[0][1].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v2/x HTTP/1.1"
    assert {b"A: b", b"Content-Length: 4"} <= set(lines)
    assert body == b"body"


@pytest.mark.parametrize("statuses", [[100], [102], [103, 103], [100, 199, 102]])
@in_loop
async def test_what_comes_before_an_answer_is_no_answer(statuses: list[int]) -> None:
    before = b"".join(b"HTTP/1.1 %d Wait\r\nX-Hint: a\r\n\r\n" % status for status in statuses)
    late = OK.replace(b"ok", b"no")
    async with scripted([before + OK, before + late, OK]) as (pool, script):
        message = pool.prepare("POST", "/v2/x", {}, b"body")
        answers = [await pool.request(message, 60) for _ in range(3)]
    assert [answer[:2] for answer in answers] == [(200, b"ok"), (200, b"no"), (200, b"ok")]
    assert all(set(answer.headers) == {b"content-length"} for answer in answers)
    assert len(script.heard) == 1


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
        assert (await pool.request(pool.prepare("GET", "/"), 10))[:2] == (200, b"ok")
        assert (await pool.request(pool.prepare("GET", "/"), 10))[:2] == (200, b"ok")
    assert len(script.heard) == 2


@pytest.mark.parametrize("method", ["GET", "POST"])
@in_loop
async def test_what_was_sent_is_never_sent_again(method: str) -> None:
    """A kept connection closes without an answer: the server has the request, whatever it did with it."""
    async with scripted([OK, MUTE, CLOSE], [OK]) as (pool, script):
        message = pool.prepare(method, "/", body=b"body" if method == "POST" else b"")
        await pool.request(message, 10)
        with pytest.raises(ConnectionError):
            await pool.request(message, 10)
        assert [len(heard) for heard in script.heard] == [2]
        assert (await pool.request(message, 10)).status == 200
    assert [len(heard) for heard in script.heard] == [2, 1]


@in_loop
async def test_a_kept_connection_that_the_server_has_closed_meanwhile_is_not_used() -> None:
    async with scripted([OK, CLOSE], [OK]) as (pool, script):
        message = pool.prepare("POST", "/", body=b"body")
        await pool.request(message, 10)
        [connection] = pool._idle
        poll = select.poll()
        poll.register(connection._transport.get_extra_info("socket").fileno(), select.POLLIN)
        connection._transport.pause_reading()  # the loop has not looked yet
        while not poll.poll(0):
            await asyncio.sleep(0)
        assert (await pool.request(message, 10)).status == 200
    assert [len(heard) for heard in script.heard] == [1, 1]


@pytest.mark.parametrize("every", [2, 3])
@in_loop
async def test_a_server_that_drops_queries_is_seen_to(every: int) -> None:
    """It takes every so-manieth query and closes the connection without a word."""
    taken = 0

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
                taken += 1
                if taken % every == 0:
                    break
                writer.write(OK)
        writer.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    load = TenantLoad("t", "m", Trace(tuple(range(0, 12_000_000, 1_000_000))), slo_ns=60_000_000_000)
    result = await run_load(
        Workload((load,), 20_000_000), http_url=url, inputs={"m": [{"x": np.ones((1, 3), np.float32)}]}
    )
    server.close()
    await server.wait_closed()
    total = result.summary.total
    assert (taken, total.failed, total.answered) == (12, 12 // every, 12 - 12 // every)
    assert total.attainment == pytest.approx(1 - 1 / every)


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
