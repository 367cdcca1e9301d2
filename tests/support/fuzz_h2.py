"""Damaged bytes of HTTP/2 connections, given to our side of a connection without a socket."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from ngh2 import Connection, Role

from cotenant.serve.frontend.admin_access import Access
from cotenant.serve.frontend.grpc_app import GrpcApp
from cotenant.serve.frontend.h2_connection import H2Connection, H2Connections
from cotenant.serve.frontend.off_loop import OffLoop
from cotenant.wire.codec import Limits
from fake_backend import CountingBackend, FakeBackend
from h2_client import INFER, PREFACE, frame, message

LIMITS = Limits(
    max_malformed=1 << 30, max_body_bytes=1 << 16, max_header_bytes=4096, max_concurrent_rpcs=8, max_stream_in_flight=4
)


class Transport:
    """What the connection writes to: bytes that are not read, and now and then a full buffer."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.protocol: Any = None
        self.is_closed = False
        self.written = 0

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else self

    def fileno(self) -> int:
        return -1

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written += len(data)
        if self._rng.random() < 0.1:
            self.protocol.pause_writing()
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        if not self.is_closed:
            self.protocol.resume_writing()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def lose(self) -> None:
        """The client has gone."""
        if not self.is_closed:
            self.is_closed = True
            self.protocol.connection_lost(None)


def _frames(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        found.append(data[at:end])
        at = end
    return found


def _good(rng: random.Random, requests: list[bytes]) -> bytes:
    """What a client sends for some calls, behind the preface."""
    client = Connection(Role.CLIENT)
    client.initiate_connection()
    for _ in range(rng.randint(1, 5)):
        path = rng.choice(
            [INFER, INFER, INFER.replace("ModelInfer", "ModelStreamInfer"), "/grpc.health.v1.Health/Check"]
        )
        headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x")]
        headers += [(b"content-type", b"application/grpc"), (b"grpc-timeout", b"10S")]
        stream = client.send_request(headers)
        for _ in range(rng.randint(1, 3)):
            client.send_data(stream, message(rng.choice(requests), int(rng.random() < 0.05)))
        if rng.random() < 0.8:
            client.end_stream(stream)
        if rng.random() < 0.2:
            client.reset_stream(stream)
    return client.data_to_send()[len(PREFACE) :]


def damaged(rng: random.Random, requests: list[bytes]) -> bytes:
    """A connection's bytes, of which some are wrong."""
    frames = _frames(_good(rng, requests))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(frames))
        match rng.randrange(8):
            case 0:
                del frames[at]
            case 1:
                frames.insert(at, frames[rng.randrange(len(frames))])
            case 2:
                frames.insert(
                    at,
                    frame(rng.randrange(14), rng.randrange(256), rng.randrange(16), rng.randbytes(rng.randrange(40))),
                )
            case 3:
                frames.insert(at, frame(3, 0, rng.randrange(1, 12), bytes(4)))
            case 4:
                size = rng.choice([0, 1, 0x7FFFFFFF, 65_535]).to_bytes(4, "big")
                frames.insert(at, frame(8, 0, rng.randrange(12), size))
            case 5:
                setting = rng.randrange(10).to_bytes(2, "big") + rng.choice(
                    [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
                ).to_bytes(4, "big")
                frames.insert(at, frame(4, 0, 0, setting))
            case _:
                changed = bytearray(frames[at])
                for _ in range(rng.randint(1, 4)):
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
                frames[at] = bytes(changed)
        if not frames:
            break
    return PREFACE + b"".join(frames)


async def _run(seed: int, count: int, requests: list[bytes], backend: CountingBackend) -> int:
    rng = random.Random(seed)
    off_loop = OffLoop()
    app = GrpcApp(backend, LIMITS, Access.CLOSED, off_loop)
    connections = H2Connections(app, LIMITS, 16, 1 << 17)
    bad: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: bad.append(context))
    closed = 0
    try:
        for number in range(count):
            transport = Transport(rng)
            transport.protocol = connection = H2Connection(connections)
            connection.connection_made(transport)
            data, at = damaged(rng, requests), 0
            while at < len(data) and not transport.is_closed:
                piece = data[at : at + rng.choice([7, 100, 1 << 14])]
                room = connection.get_buffer(-1)
                room[: len(piece)] = piece
                connection.buffer_updated(len(piece))
                at += len(piece)
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
                if rng.random() < 0.05:
                    connection.check_timeouts(asyncio.get_running_loop().time())
            closed += transport.is_closed
            if number % 3 == 0:
                connection.shut_down()
                await asyncio.sleep(0)
                connection.abort()
            await asyncio.sleep(0)
            transport.lose()
            await asyncio.sleep(0)
            assert not bad, (number, bad)
            assert not connections.all, number
        for _ in range(2000):
            if not app._in_progress and backend.settled(0):
                break
            await asyncio.sleep(0.01)
        assert app._in_progress == 0
        assert off_loop.pending.total == 0
    finally:
        app.close()
        off_loop.close()
    return closed


def run(seed: int, count: int) -> int:
    """Give a number of damaged connections to a front-end; how many of them it has ended."""
    inner = FakeBackend()
    backend = CountingBackend(inner)
    try:
        from tritonclient.grpc import service_pb2

        requests = []
        for model, size in (("inline", 4), ("identity_fp32", 4), ("slow", 4), ("inline", 20_000)):
            made = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4 * size)])
            made.inputs.add(name="x", datatype="FP32", shape=[size // 4, 4])
            requests.append(made.SerializeToString())
        requests += [b"", b"\xff"]
        closed = asyncio.run(_run(seed, count, requests, backend))
        assert backend.settled()
        return closed
    finally:
        inner.close()
