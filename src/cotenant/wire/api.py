"""Interface between front-ends (HTTP, gRPC) and the server: requests, results, errors, protocols.

Front-ends convert between the wire and these types, and have no scheduling state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, UnsetType

from cotenant.errors import CotenantError
from cotenant.types import Cause, LossCause, Outcome
from cotenant.wire.ending import FAILURE, Ending

Array = npt.NDArray[Any]


class Status(Enum):
    """Kinds of errors, as (HTTP status, gRPC status name)."""

    INVALID_ARGUMENT = (400, "INVALID_ARGUMENT")
    FORBIDDEN = (403, "PERMISSION_DENIED")
    NOT_FOUND = (404, "NOT_FOUND")
    TOO_LARGE = (413, "INVALID_ARGUMENT")
    INTERNAL = (500, "INTERNAL")
    UNIMPLEMENTED = (501, "UNIMPLEMENTED")
    TOO_MANY = (429, "RESOURCE_EXHAUSTED")
    """Query rate above the tenant's `max_rate`. Every other refusal for load is UNAVAILABLE."""
    UNAVAILABLE = (503, "UNAVAILABLE")
    CANCELLED = (499, "CANCELLED")


class ServeError(CotenantError):
    """Error of a request: status for the wire, message for the user, and ending of the query.

    The default of `ending` follows from the status. UNAVAILABLE and NOT_FOUND then mean that the server takes no such
    query (`Cause.UNSERVED`). `cause`: cause of the loss, for a request refused before it is a query (QueryRefused).
    """

    def __init__(
        self, status: Status, message: str, ending: Ending | None = None, cause: LossCause | UnsetType = LossCause.GONE
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.ending = ending or _ENDINGS.get(status, FAILURE)
        self.cause = cause

    @property
    def is_for_load(self) -> bool:
        """Whether the query was refused because of load, so that the client may retry it later."""
        return self.status in (Status.UNAVAILABLE, Status.TOO_MANY) and self.ending.cause is None


_UNSERVED = Ending(Outcome.REJECTED, Cause.UNSERVED)
_ENDINGS = {
    Status.UNAVAILABLE: _UNSERVED,
    Status.NOT_FOUND: Ending(Outcome.FAILED, Cause.UNSERVED),
    Status.CANCELLED: Ending(Outcome.CANCELLED),
    Status.TOO_MANY: Ending(Outcome.REJECTED),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, OIP datatype (`FP32`, `INT64`, `BYTES`, ...) and shape of an input or output; -1 is a dynamic dimension. If
    the rank is unknown, `is_ranked` is False, and the shape is [-1] for clients that need one."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_ranked: bool = True


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata of a model version for clients."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    """Largest batch; 0 if queries are never merged, and then shapes have every dimension."""


class InferRequest(Struct, frozen=True, gc=False):
    """Decoded inference request: arrays have the declared datatypes and shapes.

    BYTES tensors are object arrays of `bytes`. `priority`: 0 if unset. `timeout_ns`: None for no time-out.
    `arrival_ns`: monotonic time when its first byte was readable; 0 for the time of its submission.
    """

    model: str
    inputs: Mapping[str, Array]
    version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    """Names of requested outputs; empty means all."""
    priority: int = 0
    timeout_ns: int | None = None
    arrival_ns: int = 0


class InferResult(Struct, frozen=True, gc=False):
    """Result of a request. `outputs`: for ANSWERED and LATE only; `reason`: for all other outcomes."""

    outcome: Outcome
    query: int
    """Query number, as in `cotenant explain`."""
    model_version: str = ""
    outputs: Mapping[str, Array] = msgspec.field(default_factory=dict)
    reason: str = ""
    status: Status | None = None
    """Set for all but ANSWERED and LATE."""
    ended_ns: int = 0
    """End of the query by the server's clock in ns; 0 if not recorded."""
    refusal: ServeError | None = None
    """Error of a request that was refused after `submit` returned, and never became a query."""


_STATUS_OF = {
    Outcome.REJECTED: Status.UNAVAILABLE,
    Outcome.DROPPED: Status.UNAVAILABLE,
    Outcome.FAILED: Status.INTERNAL,
    Outcome.CANCELLED: Status.CANCELLED,
}


def unanswered(
    outcome: Outcome, query: int, version: str, reason: str, cause: LossCause | UnsetType = UNSET
) -> InferResult:
    """Build the result of a query that ended without outputs."""
    status = Status.TOO_MANY if cause is LossCause.RATE_LIMIT else _STATUS_OF[outcome]
    return InferResult(outcome, query, version, reason=reason, status=status)


def not_answered(result: InferResult, *, ready: bool) -> ServeError:
    """Build the error of a query without an answer; UNSERVED if it was rejected and the server is not ready."""
    if (refused := result.refusal) is not None:  # a new error, as a traceback would keep the result alive
        return ServeError(refused.status, refused.message, refused.ending, refused.cause)
    ending = _UNSERVED if result.outcome is Outcome.REJECTED and not ready else Ending(result.outcome)
    reason = result.reason or f"the query was {result.outcome}"
    return ServeError(result.status or Status.INTERNAL, reason, ending)


@dataclass(frozen=True, slots=True)
class Duration:
    """A number of events and their total time."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Counters of a model version in the form of the protocol's statistics extension."""

    name: str
    version: str
    last_inference_ms: int
    inference_count: int
    execution_count: int
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index; `state` is READY or UNAVAILABLE, `reason` says why."""

    name: str
    version: str
    state: str
    reason: str = ""


class Describe(Protocol):
    """Description of served models. All methods of these protocols are thread-safe and may raise ServeError."""

    def ready(self) -> bool:
        """Whether queries are accepted: the server has started and does not drain."""

    def model_ready(self, model: str, version: str) -> bool:
        """Whether a model accepts queries; version "" is the default one. NOT_FOUND for an unknown name."""

    def metadata(self, model: str, version: str) -> ModelMetadata:
        """Metadata of a model; NOT_FOUND for an unknown one."""

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        """Configuration of a model in the form of the model configuration extension (`name`, `platform`, `backend`,
        `max_batch_size`, `input`, `output`, `dynamic_batching`...)."""


class Infer(Describe, Protocol):
    """Backend for queries of the described models."""

    def refusal(self, model: str, version: str) -> ServeError | None:
        """Why every query of a model is refused now; None if a query may be accepted. For requests with an unread body:
        quick, without side effects. The result may be out of date."""

    def refused(self, model: str, arrival_ns: int, error: ServeError) -> None:
        """Count a request that a front-end refused before it became a query: by `refusal`, or for lack of memory.

        Called once per refused request. `arrival_ns`: when its first byte was readable.
        """

    def submit(self, request: InferRequest, done: Callable[[InferResult], None]) -> int:
        """Submit a query and return its number.

        `done` is called exactly once, on any thread, possibly before this method returns, and must be quick. Raises
        ServeError, without a call of `done`, for an invalid request (unknown model or input, wrong datatype or shape).
        """

    def cancel(self, query: int) -> None:
        """Withdraw a query; an ended query is ignored."""


class Control(Describe, Protocol):
    """Control of a server with a model repository: loads, statistics, metrics, plan."""

    def live(self) -> bool:
        """Whether the process can answer."""

    def statistics(self, model: str, version: str) -> Sequence[ModelStatistics]:
        """Counters of one model, or of all if `model` is empty."""

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """Models of the repository, including those that failed to load."""

    def load(self, model: str) -> None:
        """Load or reload a model from the repository."""

    def unload(self, model: str) -> None:
        """Stop serving a model; its queued queries fail with a reason."""

    def metrics(self) -> bytes:
        """Metrics page in the Prometheus text format."""

    def plan(self) -> Mapping[str, Any]:
        """Running plan and observed rates as plain values. NOT_FOUND without a plan."""


class Backend(Infer, Control, Protocol):
    """The server as its front-ends use it."""

    def replied(self, result: InferResult) -> None:
        """Record that an answer was passed to its connection, or is never written.

        Called once per answered query of a request with an `arrival_ns`. Optional for unanswered or withdrawn queries.
        """


DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}
"""OIP datatype -> numpy dtype; the codec adds BF16."""
