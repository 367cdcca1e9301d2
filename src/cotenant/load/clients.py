"""Clients of the load generator, over HTTP and over gRPC (grpc.aio): send a query and report its outcome.

Requests are encoded beforehand. The outcome is None for a result, which only the caller can classify as answered or
late.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import grpc
from google.protobuf import json_format
from typing_extensions import override

from cotenant.load.answer_check import AnswerCheck
from cotenant.load.errors import LoadError
from cotenant.load.http import HttpAnswer, HttpPool
from cotenant.types import Outcome
from cotenant.wire.api import Array
from cotenant.wire.decode import grpc_outputs, http_outputs
from cotenant.wire.ending import grpc_ending, http_ending, read_ending
from cotenant.wire.oip import MESSAGES, SERVICE


class Reply(NamedTuple):
    """End of a query on the wire: outcome None for a result, else its outcome and the text of the server or network.

    `is_wrong`: there was a response with wrong content.
    """

    outcome: Outcome | None
    reason: str = ""
    is_wrong: bool = False


class Client(Protocol):
    """Sends the prepared requests of one tenant."""

    async def send(self, request: int, timeout_s: float) -> Reply:
        """Send prepared request number `request`. Does not raise for errors of the server or the network."""

    async def close(self) -> None:
        """Close the connections."""


_RESULT = Reply(None)
_LOOKS, _LOOK_S = 10, 0.002
"""Number and interval of checks of a connection before its server counts as reachable."""


class HttpClient(Client):
    """Client of one tenant over HTTP, on a pool of connections shared by tenants."""

    def __init__(
        self,
        pool: HttpPool,
        model: str,
        requests: Sequence[tuple[bytes, Mapping[str, str]]],
        check: AnswerCheck | None = None,
    ) -> None:
        self._pool = pool
        self._check = check
        path = f"{model_path(model)}/infer"
        self._requests = [pool.prepare("POST", path, headers, body) for body, headers in requests]

    @override
    async def send(self, request: int, timeout_s: float) -> Reply:
        try:
            answer = await self._pool.request(self._requests[request], timeout_s)
        except TimeoutError:
            return Reply(Outcome.FAILED, "no answer within the client's limit")
        except OSError as error:
            return Reply(Outcome.FAILED, f"{type(error).__name__}: {error}")
        if answer.status == 200:
            return _RESULT if self._check is None else _checked(self._check, request, http_outputs, answer.body)
        return http_reply(answer)

    @override
    async def close(self) -> None:
        pass  # the owner closes the shared pool


def model_path(model: str) -> str:
    """Path of a model on a server of the protocol."""
    return f"/v2/models/{quote(model, safe='')}"


def http_reply(answer: HttpAnswer) -> Reply:
    """Outcome and text of a response without a result."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers.items()}
    return Reply(http_ending(answer.status, headers).outcome, _error_text(answer.body, answer.status))


def _error_text(payload: bytes, status: int) -> str:
    try:
        message = json.loads(payload)["error"]
    except (ValueError, KeyError, TypeError):
        message = payload[:200].decode(errors="replace")
    return str(message) or f"HTTP status {status} without a text"


class GrpcClient(Client):
    """Client of one tenant over gRPC, with its own connection; messages stay encoded."""

    def __init__(self, target: str, requests: Sequence[bytes], check: AnswerCheck | None = None) -> None:
        self._requests = requests
        self._check = check
        self._channel = open_channel(target)
        self._infer = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")

    @override
    async def send(self, request: int, timeout_s: float) -> Reply:
        try:
            data = await self._infer(self._requests[request], timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return await grpc_reply(error, self._channel)
        if self._check is None:
            return _RESULT
        return _checked(self._check, request, grpc_outputs, MESSAGES["ModelInferResponse"].FromString(data))

    @override
    async def close(self) -> None:
        await self._channel.close()


def _checked(check: AnswerCheck, request: int, decode: Callable[[Any], dict[str, Array]], answer: Any) -> Reply:
    """A result, or a failure if the response differs from the first one or cannot be decoded."""
    try:
        fault = check.fault(request, decode(answer))
    except Exception as error:  # any malformed response
        fault = f"wrong answer: {type(error).__name__}: {error}"
    return Reply(Outcome.FAILED, fault, is_wrong=True) if fault else _RESULT


async def grpc_reply(error: Any, channel: Any) -> Reply:
    """Outcome and text of a call without a result. `channel` is that of the call."""
    code, details = error.code(), error.details() or ""
    metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
    outcome = grpc_ending(code.name, metadata).outcome
    if code is grpc.StatusCode.UNAVAILABLE and read_ending(metadata) is None and await _is_lost(channel):
        outcome = Outcome.FAILED
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        details = details or "no answer within the client's limit"
    return Reply(outcome, details or code.name)


async def _is_lost(channel: Any) -> bool:
    """Whether a channel has lost its server. The gRPC library reports UNAVAILABLE for it, as servers do under overload.

    The library ends the calls first, and updates the state of the channel later.
    """
    for _ in range(_LOOKS):
        if channel.get_state() is not grpc.ChannelConnectivity.READY:
            return True
        await asyncio.sleep(_LOOK_S)
    return False


def open_channel(target: str) -> Any:
    """Open a gRPC channel with its own connection and no limit on messages. `target` is `host:port`."""
    return grpc.aio.insecure_channel(
        target.removeprefix("grpc://").removeprefix("http://").rstrip("/"),
        options=[
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ],
    )


class ModelInfo(NamedTuple):
    """Metadata and configuration of a model, as JSON from the server."""

    metadata: Mapping[str, Any]
    config: Mapping[str, Any]


async def describe_http(pool: HttpPool, model: str) -> ModelInfo:
    """Fetch metadata and configuration of a model over HTTP. Raises LoadError with the reason."""
    found = []
    for path in (model_path(model), f"{model_path(model)}/config"):
        try:
            status, payload, _ = await pool.request(pool.prepare("GET", path), timeout_s=10)
        except OSError as error:
            reason = str(error) or type(error).__name__
            raise LoadError(f"no server answers at {pool.url} ({reason}); start one with: cotenant serve") from error
        if status != 200:
            raise LoadError(f"model {model!r} at {pool.url}: {_error_text(payload, status)}")
        try:
            found.append(json.loads(payload))
        except ValueError as error:
            raise LoadError(f"model {model!r} at {pool.url}: the answer to GET {path} is not JSON") from error
    return ModelInfo(*found)


async def describe_grpc(target: str, model: str) -> ModelInfo:
    """Fetch metadata and configuration of a model over gRPC. Raises LoadError with the reason."""
    channel = open_channel(target)
    found = []
    try:
        for method in ("ModelMetadata", "ModelConfig"):
            call = channel.unary_unary(
                f"/{SERVICE}/{method}",
                request_serializer=MESSAGES[f"{method}Request"].SerializeToString,
                response_deserializer=MESSAGES[f"{method}Response"].FromString,
            )
            try:
                answer = await call(MESSAGES[f"{method}Request"](name=model), timeout=10)
            except grpc.aio.AioRpcError as error:
                raise LoadError(f"model {model!r} at {target}: {error.details() or error.code().name}") from error
            found.append(json_format.MessageToDict(answer, preserving_proto_field_name=True))
    finally:
        await channel.close()
    return ModelInfo(found[0], found[1].get("config", {}))
