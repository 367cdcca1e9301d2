"""Connections of the gateway to one node over HTTP and gRPC; messages are bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import grpc
import msgspec
from yarl import URL

from cotenant.cluster.forward import BrokenError, NotRunError
from cotenant.cluster.types import Address
from cotenant.types import Cause, Outcome
from cotenant.wire.ending import Ending, grpc_ending, http_ending, read_ending
from cotenant.wire.oip import SPENT_KEY

ANSWER_LIMIT_S = 600.0
"""Time limit in seconds of a query; a live node that is silent for so long has lost it."""
_CONNECT_LIMIT_S = 2.0
_POOL = 512
_RESULT = Ending(Outcome.ANSWERED)
Headers = list[tuple[str, str]]


class HttpReply(NamedTuple):
    """HTTP answer of a node."""

    status: int
    headers: Headers
    body: bytes
    ending: Ending
    node: str


class GrpcReply(NamedTuple):
    """gRPC answer of a node: bytes, or an error status with details."""

    data: bytes
    code: Any
    details: str
    trailing: Sequence[tuple[str, str | bytes]]
    ending: Ending
    node: str


class NodeLink:
    """Connection pools to the node `name`, opened at first use."""

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self._address = address
        self._session: aiohttp.ClientSession | None = None
        self._channel: Any = None
        self._closed = False

    async def http(self, method: str, raw_path: str, headers: Headers, body: bytes, spent_ns: int = 0) -> HttpReply:
        """Send a request that arrived `spent_ns` ago. Raises NotRunError, BrokenError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_POOL),
                timeout=aiohttp.ClientTimeout(total=ANSWER_LIMIT_S, sock_connect=_CONNECT_LIMIT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        url = URL(f"http://{host}:{self._address.http_port}{raw_path}", encoded=True)
        if spent_ns:
            headers = [*headers, (SPENT_KEY, str(spent_ns // 1000))]
        try:
            async with self._session.request(
                method, url, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                content = await answer.read()
                found = list(answer.headers.items())
                status = answer.status
                ending = _RESULT if status < 400 else http_ending(status, answer.headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotRunError(f"node {self.name!r}: {error}", gone=True) from None
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise BrokenError(f"node {self.name!r}: {error or type(error).__name__}") from None
        reply = HttpReply(status, found, content, ending, self.name)
        if ending.cause is Cause.UNSERVED:  # the node stops, or its plan differs from the table
            raise NotRunError(f"node {self.name!r}: {_sentence(content)}", gone=False, reply=reply)
        return reply

    async def grpc(self, method: str, data: bytes, timeout_s: float | None, spent_ns: int = 0) -> GrpcReply:
        """Send a unary call of '/package.Service/Method' that arrived `spent_ns` ago with a limit of `timeout_s`.

        Raises NotRunError, BrokenError.
        """
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                f"{self._address.host}:{self._address.grpc_port}",
                options=[
                    ("grpc.use_local_subchannel_pool", 1),
                    ("grpc.max_send_message_length", -1),
                    ("grpc.max_receive_message_length", -1),
                    ("grpc.enable_retries", 0),  # only the forwarder decides on retries
                    ("grpc.initial_reconnect_backoff_ms", 100),
                    ("grpc.max_reconnect_backoff_ms", 1000),
                ],
            )
        limit_s = ANSWER_LIMIT_S if timeout_s is None else min(timeout_s - spent_ns / 1e9, ANSWER_LIMIT_S)
        metadata = ((SPENT_KEY, str(spent_ns // 1000)),) if spent_ns else ()
        try:
            await self._connected()
            call = self._channel.unary_unary(method)(data, timeout=max(0.0, limit_s), metadata=metadata)
            answer = await call
        except grpc.aio.AioRpcError as error:
            return self._failed(error, has_deadline=timeout_s is not None)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            task = asyncio.current_task()
            if self._closed and not (task is not None and task.cancelling()):
                raise BrokenError(f"node {self.name!r} was lost") from None
            raise
        trailing = tuple(await call.trailing_metadata() or ())
        return GrpcReply(answer, grpc.StatusCode.OK, "", trailing, _RESULT, self.name)

    async def _connected(self) -> None:
        """Wait for a connection. Raises NotRunError without one: a query that was not sent has not run."""
        ready = grpc.ChannelConnectivity.READY
        state = self._channel.get_state(try_to_connect=True)
        if state is ready:
            return
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                while state is not ready:
                    if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                        raise NotRunError(f"node {self.name!r}: the connection failed", gone=True)
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise NotRunError(f"node {self.name!r}: no connection within {_CONNECT_LIMIT_S:g} s", gone=True) from None

    def _failed(self, error: Any, *, has_deadline: bool) -> GrpcReply:
        code, details = error.code(), error.details() or ""
        trailing = tuple(error.trailing_metadata() or ())
        fields = {key: str(value) for key, value in trailing}
        where = f"node {self.name!r}: {details}"
        if (code is grpc.StatusCode.UNAVAILABLE and read_ending(fields) is None) or (
            code is grpc.StatusCode.CANCELLED and self._closed
        ):
            raise BrokenError(where) from None
        ending = grpc_ending(code.name, fields)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and has_deadline:
            ending = Ending(Outcome.CANCELLED)
        reply = GrpcReply(b"", code, details, trailing, ending, self.name)
        if ending.cause is Cause.UNSERVED:
            raise NotRunError(where, gone=False, reply=reply) from None
        return reply

    async def close(self) -> None:
        """Close all connections; outstanding calls fail."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()
        if self._session is not None:
            await self._session.close()


def _sentence(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
