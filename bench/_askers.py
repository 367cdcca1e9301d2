"""Clients that compare each answer with their request, and of which many leave before they are answered."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from bench._carry import MOST_ROWS, Arrays, Ask
from cotenant.load.clients import Reply, grpc_reply, http_reply, model_path, open_channel
from cotenant.load.http import HttpPool
from cotenant.measure.merging_trial import is_same_answer
from cotenant.types import Outcome
from cotenant.wire.decode import grpc_outputs, http_outputs
from cotenant.wire.encode import grpc_request, http_request
from cotenant.wire.ending import FAILURE, read_ending
from cotenant.wire.oip import MESSAGES, SERVICE

GIVE_UP_S = 60.0
TRANSPORTS = ("http-binary", "http-json", "grpc", "grpc-stream")
UNANSWERED = "no answer: "
"""Begins the reasons of queries that ended without an answer of the server."""
_MOST_IN_STREAM = 5
_EXAMPLES = 5
_JSON_TYPES = {"float32": "FP32", "int64": "INT64", "bool": "BOOL", "object": "BYTES"}


@dataclass(frozen=True, slots=True)
class Target:
    """A model to ask: how often compared with the others, and up to how many rows."""

    model: str
    ask: Ask
    share: float = 1.0
    most_rows: int = MOST_ROWS // 2
    is_alone: bool = False
    """The expected answer is that of the model for this query alone, up to rounding."""


@dataclass(slots=True)
class Tally:
    """Counts of the outcomes of queries. Clients in `left` disconnected before the answer; all others stayed."""

    answers: int = 0
    foreign: int = 0
    dependent: int = 0
    unanswered: int = 0
    failed: int = 0
    left: int = 0
    timed_out: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count what another one has counted as well."""
        for name in ("answers", "foreign", "dependent", "unanswered", "failed", "left", "timed_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons += other.reasons
        self.examples = (self.examples + other.examples)[:_EXAMPLES]

    def check(self, target: Target, outputs: Arrays, expected: Any) -> None:
        """Compare an answer with the request."""
        model, got = target.model, outputs.get("y")
        if target.is_alone:
            is_right = got is not None and is_same_answer({"y": expected}, {"y": got})
        else:
            is_right = got is not None and got.shape == expected.shape and bool((got == expected).all())
        if is_right:
            self.answers += 1
            return
        if target.is_alone:
            self.dependent += 1
        else:
            self.foreign += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{model}: expected {_short(expected)}, got {_short(got)}")

    def refuse(self, reason: str) -> None:
        """Count a query of a client that stayed and got no answer."""
        self.failed += 1
        self.reasons["".join("#" if each.isdigit() else each for each in reason)[:160]] += 1


class Askers:
    """Callers of one server, each with one query inside, or one stream of a few.

    `leaving` is the share that leaves, at a moment drawn up to `patience_s`; `hurried` that with a time-out of its own.
    """

    def __init__(
        self,
        http_url: str,
        grpc_url: str,
        targets: Sequence[Target],
        *,
        seed: int = 0,
        leaving: float = 0.3,
        hurried: float = 0.04,
        patience_s: float = 0.06,
        transports: Sequence[str] = TRANSPORTS,
        numbers: Iterator[int] | None = None,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self.tally = Tally()
        self._pool = HttpPool(http_url)
        self._channel = open_channel(grpc_url)
        self._unary = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")
        self._stream = self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        self._targets = targets
        self._rng = Random(seed)
        self._leaving, self._hurried, self._patience_s = leaving, hurried, patience_s
        self._transports = transports
        self._numbers = numbers or itertools.count(1)
        self._give_up_s = give_up_s

    async def run(self, callers: int, is_over: Callable[[Tally], bool]) -> Tally:
        """Ask until it is over; every query that was sent is waited for."""

        async def caller() -> None:
            while not is_over(self.tally):
                await self._turn()

        try:
            await asyncio.gather(*(caller() for _ in range(callers)))
        finally:
            self._pool.close()
            await self._channel.close()
        return self.tally

    async def _turn(self) -> None:
        rng = self._rng
        target = rng.choices(self._targets, [each.share for each in self._targets])[0]
        transport = rng.choice(self._transports)
        count = rng.randint(1, _MOST_IN_STREAM) if transport == "grpc-stream" else 1
        asked = [target.ask(next(self._numbers), rng.randint(1, target.most_rows)) for _ in range(count)]
        fate = rng.random()
        leaves, hurries = fate < self._leaving, self._leaving <= fate < self._leaving + self._hurried
        parameters = {"timeout": rng.randint(200, 40_000)} if hurries else {}
        work = asyncio.ensure_future(self._send(transport, target.model, asked, parameters))
        if leaves:
            done, _ = await asyncio.wait([work], timeout=rng.random() * self._patience_s)
            if not done:
                work.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await work
                self.tally.left += count
                return
        try:
            replies = await work
        except (OSError, grpc.aio.AioRpcError) as error:
            self.tally.unanswered += count
            self.tally.reasons[f"{UNANSWERED}{type(error).__name__}: {str(error)[:120]}"] += count
            return
        for reply, (_, expected) in zip(replies, asked, strict=True):
            if not isinstance(reply, Reply):
                self.tally.check(target, reply, expected)
            elif hurries and reply.outcome in (Outcome.DROPPED, Outcome.REJECTED):
                self.tally.timed_out += 1
            else:
                self.tally.refuse(reply.reason)

    async def _send(
        self, transport: str, model: str, asked: Sequence[tuple[Arrays, Any]], parameters: dict[str, int]
    ) -> list[Arrays | Reply]:
        """Send and wait: the outputs of each, or why there are none. Raises OSError, AioRpcError."""
        if transport == "grpc-stream":
            return await self._send_stream(model, asked, parameters)
        [(inputs, _)] = asked
        if transport == "grpc":
            try:
                data = await self._unary(grpc_request(model, inputs, parameters), timeout=self._give_up_s)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
                    return [await grpc_reply(error, self._channel)]
                raise
            return [grpc_outputs(MESSAGES["ModelInferResponse"].FromString(data))]
        body, headers = (
            http_request(inputs, parameters) if transport == "http-binary" else _json_request(inputs, parameters)
        )
        message = self._pool.prepare("POST", f"{model_path(model)}/infer", headers, body)
        answer = await self._pool.request(message, self._give_up_s)
        return [http_outputs(answer.body) if answer.status == 200 else http_reply(answer)]

    async def _send_stream(
        self, model: str, asked: Sequence[tuple[Arrays, Any]], parameters: dict[str, int]
    ) -> list[Arrays | Reply]:
        call = self._stream(timeout=self._give_up_s)
        answers: dict[str, Any] = {}
        try:
            for at, (inputs, _) in enumerate(asked):
                request = MESSAGES["ModelInferRequest"].FromString(grpc_request(model, inputs, parameters))
                request.id = str(at)
                await call.write(request.SerializeToString())
            await call.done_writing()
            async for data in call:
                answer = MESSAGES["ModelStreamInferResponse"].FromString(data)
                answers[answer.infer_response.id] = answer
        finally:
            call.cancel()
        if len(answers) != len(asked):
            raise OSError(f"a stream of {len(asked)} requests ended with {len(answers)} answers")
        ordered = [answers[str(at)] for at in range(len(asked))]
        return [_failed(answer) if answer.error_message else grpc_outputs(answer.infer_response) for answer in ordered]


def _failed(answer: Any) -> Reply:
    told = {key: value.string_param for key, value in answer.infer_response.parameters.items()}
    return Reply((read_ending(told) or FAILURE).outcome, answer.error_message)


def for_seconds(seconds: float) -> Callable[[Tally], bool]:
    """Over after so long."""
    end = time.monotonic() + seconds
    return lambda _: time.monotonic() >= end


def _json_request(inputs: Arrays, parameters: dict[str, int]) -> tuple[bytes, dict[str, str]]:
    tensors = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": _JSON_TYPES[array.dtype.name],
            "data": [item.decode() if isinstance(item, bytes) else item for item in array.ravel().tolist()],
        }
        for name, array in inputs.items()
    ]
    return json.dumps({"inputs": tensors, "parameters": parameters}).encode(), {"Content-Type": "application/json"}


def _short(array: Any) -> str:
    return "nothing" if array is None else f"{list(array.shape)} {array.ravel()[:4].tolist()}"
