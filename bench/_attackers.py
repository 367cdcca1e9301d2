"""Clumsy and hostile clients of a server: `python -m bench._attackers KIND HTTP_URL PID` until SIGTERM, then a line.

They send at fixed rates with a low priority, so that they cost other clients only the server's time. At the end the
module prints their actions and their own processor time, in JSON.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlparse

from cotenant.load.clients import model_path

TENANT = "tiny"
"""The tenant of the model that attackers ask for."""
_NICE = 10
_MIB = 1 << 20
_TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
_INFER = f"POST {model_path(TENANT)}/infer HTTP/1.1\r\nHost: a\r\n"


def query() -> bytes:
    """A valid query."""
    head = json.dumps({"inputs": [_TENSOR], "parameters": {"binary_data_output": True}}).encode()
    fields = f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + 64}\r\n\r\n"
    return (_INFER + fields).encode() + head + bytes(64)


def posted(body: bytes, fields: str = "") -> bytes:
    """A request for the model with any body."""
    return f"{_INFER}{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Attack:
    """One kind of attack on one server; `sent` counts its requests, `answers` the responses by HTTP status."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.sent = 0
        self.answers: dict[str, int] = {}

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection."""
        return await asyncio.open_connection(self.host, self.port, limit=64 * _MIB)

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        """Send a request and read its answer."""
        writer.write(request)
        self.sent += 1
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status = head[9:12].decode()
        self.answers[status] = self.answers.get(status, 0) + 1
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)

    async def keep_asking(self, request: Callable[[int], bytes], per_s: float, connections: int = 8) -> None:
        """Requests at a rate, over some connections, each of which is opened anew when the server has closed it."""

        async def one(number: int) -> None:
            stream = await self.open()
            due_s = time.monotonic() + number / per_s
            while True:
                await asyncio.sleep(due_s - time.monotonic())
                due_s = max(due_s + connections / per_s, time.monotonic() - 1.0)
                try:
                    await self.ask(*stream, request(self.sent))
                except (OSError, asyncio.IncompleteReadError):
                    stream[1].close()
                    stream = await self.open()

        await asyncio.gather(*[one(number) for number in range(connections)])

    # --- kinds ----------------------------------------------------------------------------------------------------

    async def gzip(self) -> None:
        """6 bodies a second that inflate from 64 kB to 63 MiB."""
        bomb = posted(gzip.compress(bytes(63 * _MIB)), "Content-Encoding: gzip\r\n")
        await self.keep_asking(lambda _: bomb, 6.0, 2)

    async def unread(self) -> None:
        """64 clients that send queries and never read an answer."""

        async def one() -> None:
            while True:
                _, writer = await self.open()
                with suppress(OSError, TimeoutError):
                    while True:
                        writer.write(query() * 20)
                        self.sent += 20
                        async with asyncio.timeout(5.0):
                            await writer.drain()
                        await asyncio.sleep(0.5)
                writer.close()

        await asyncio.gather(*[one() for _ in range(64)])

    async def flood(self) -> None:
        """1,369 tiny valid queries a second of another tenant."""
        whole = query()
        await self.keep_asking(lambda _: whole, 1369.0, 16)

    async def images(self) -> None:
        """15 images of 1600 x 1600 a second, which the model refuses."""
        tensor = {**_TENSOR, "datatype": "UINT8", "shape": [1, 1600, 1600, 3]}
        tensor["parameters"] = {"binary_data_size": 1600 * 1600 * 3}
        head = json.dumps({"inputs": [tensor]}).encode()
        image = posted(head + bytes(1600 * 1600 * 3), f"Inference-Header-Content-Length: {len(head)}\r\n")
        await self.keep_asking(lambda _: image, 15.0, 4)

    async def malformed(self) -> None:
        """500 requests a second that are no JSON, no protocol or no HTTP."""
        wrong = (posted(b"{"), posted(b'{"inputs": 7}'), b"GET /v9 HTTP/1.1\r\n\r\n", b"\x16\x03\x01\r\n\r\n")
        await self.keep_asking(lambda number: wrong[number % len(wrong)], 500.0)

    async def nested(self) -> None:
        """20 bodies a second of 500,000 brackets."""
        body = posted(b'{"inputs": ' + b"[" * 500_000)
        await self.keep_asking(lambda _: body, 20.0, 4)

    async def slow_heads(self) -> None:
        """400 connections that send their heads at one byte a second."""

        async def one() -> None:
            while True:
                _, writer = await self.open()
                with suppress(OSError):
                    for byte in query():
                        writer.write(bytes([byte]))
                        self.sent += 1
                        await writer.drain()
                        await asyncio.sleep(1.0)
                writer.close()

        await asyncio.gather(*[one() for _ in range(400)])

    async def endless(self) -> None:
        """8 clients that send endless bodies, at 10 MB a second together."""

        async def one() -> None:
            chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
            while True:
                _, writer = await self.open()
                with suppress(OSError):
                    writer.write(f"{_INFER}Transfer-Encoding: chunked\r\n\r\n".encode())
                    while True:
                        writer.write(chunk)
                        self.sent += 1
                        await writer.drain()
                        await asyncio.sleep(0.05)
                writer.close()

        await asyncio.gather(*[one() for _ in range(8)])

    async def loads(self) -> None:
        """The model is loaded again and again."""
        path = f"/v2/repository/models/{TENANT}/load"
        again = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
        await self.keep_asking(lambda _: again, 2.0, 1)


KINDS = ("gzip", "unread", "flood", "images", "malformed", "nested", "slow_heads", "endless", "loads")


async def attack(kind: str, url: str) -> Attack:
    """Attack until SIGTERM."""
    place = urlparse(url)
    made = Attack(str(place.hostname), int(place.port or 0))
    work: Callable[[], Awaitable[None]] = getattr(made, kind)
    task = asyncio.ensure_future(work())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    print("ready", flush=True)
    with suppress(asyncio.CancelledError):
        await task
    return made


def main() -> None:
    """Attack, and return the counts."""
    kind, url = sys.argv[1:]
    os.nice(_NICE)
    made = asyncio.run(attack(kind, url))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"sent": made.sent, "answers": made.answers, "cpu_s": used.ru_utime + used.ru_stime}), flush=True)


if __name__ == "__main__":
    main()
