"""Conversions for gRPC: call deadline to query time-out, result to response message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from cotenant.types import ANSWERS
from cotenant.wire import codec_grpc
from cotenant.wire.api import Infer, InferResult, ServeError, not_answered
from cotenant.wire.codec import WireRequest
from cotenant.wire.ending import FAILURE

_DAY_S = 86_400.0
"""Seconds; a call deadline that is further away counts as none."""


def with_deadline(wire: WireRequest, remaining_s: float | None) -> WireRequest:
    """Use the deadline of the call as the time-out of the query."""
    if remaining_s is None or remaining_s > _DAY_S:
        return wire
    request = structs.replace(wire.request, timeout_ns=max(1, int(remaining_s * 1e9)))
    return structs.replace(wire, request=request)


def encode_answer(
    backend: Infer, wire: WireRequest, result: InferResult, replied: Callable[[InferResult], None] = lambda _: None
) -> Any:
    """Build the response message of a query, and call `replied` if it was answered.

    Raises ServeError if it was not answered or cannot be encoded.
    """
    if result.outcome not in ANSWERS:
        raise not_answered(result, ready=backend.ready())
    try:
        batched = False
        if wire.wants_classes:
            batched = backend.metadata(wire.request.model, wire.request.version).max_batch_size > 0
        return codec_grpc.encode_response(wire, result, batched)
    except ServeError as error:  # the query has run: a gateway must not retry it
        raise ServeError(error.status, error.message, FAILURE) from None
    finally:
        replied(result)
