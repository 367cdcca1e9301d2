"""What the front-ends (HTTP, gRPC) and the server behind them say to each other.

Front-ends translate between the wire and these types and hold no scheduling state.
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
    """Kinds of refusal, as (HTTP status, gRPC status name)."""

    INVALID_ARGUMENT = (400, "INVALID_ARGUMENT")
    FORBIDDEN = (403, "PERMISSION_DENIED")
    NOT_FOUND = (404, "NOT_FOUND")
    TOO_LARGE = (413, "INVALID_ARGUMENT")
    INTERNAL = (500, "INTERNAL")
    UNIMPLEMENTED = (501, "UNIMPLEMENTED")
    TOO_MANY = (429, "RESOURCE_EXHAUSTED")
    """More queries a second than the tenant's `max_rate`; whatever else is refused for load is UNAVAILABLE."""
    UNAVAILABLE = (503, "UNAVAILABLE")
    CANCELLED = (499, "CANCELLED")


class ServeError(CotenantError):
    """A request cannot be served; carries the status for the wire, a sentence for the user, and how the query ended.

    Where `ending` is not given the status says it: UNAVAILABLE and NOT_FOUND are servers that take no such query.
    `cause` is that of a lost query, for one that is refused before it is a query (see QueryRefused).
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
        """Whether the server would have taken the query with less to do: its client may try again later."""
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
    """Name, OIP datatype (`FP32`, `INT64`, `BYTES`, ...) and shape of an input or output; -1 is a dynamic dimension.

    Where not even the rank is known, `is_ranked` is False, and the shape is [-1] for those who have to be told one.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_ranked: bool = True


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What clients may know of one model version."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    """0 when queries are never merged (then shapes hold every dimension), else the largest batch."""


class InferRequest(Struct, frozen=True, gc=False):
    """One inference as a client asked for it, already decoded: arrays have the datatype and shape that was declared.

    BYTES tensors are object arrays of `bytes`. `priority` 0 means unset; `timeout_ns` None means none. `arrival_ns` is
    the monotonic time when its first byte could be read; 0 stands for the time when it is submitted.
    """

    model: str
    inputs: Mapping[str, Array]
    version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    """Names asked for; empty means all."""
    priority: int = 0
    timeout_ns: int | None = None
    arrival_ns: int = 0


class InferResult(Struct, frozen=True, gc=False):
    """How a request ended. `outputs` are there for ANSWERED and LATE alone; `reason` says why for all else."""

    outcome: Outcome
    query: int
    """The number of the query, as `cotenant explain` takes it."""
    model_version: str = ""
    outputs: Mapping[str, Array] = msgspec.field(default_factory=dict)
    reason: str = ""
    status: Status | None = None
    """Set for all but ANSWERED and LATE."""
    ended_ns: int = 0
    """When it ended, by the server's clock; 0 where nobody looks at it."""
    refusal: ServeError | None = None
    """What `submit` would have raised, where the request was refused after it had returned: it is no query."""


_STATUS_OF = {
    Outcome.REJECTED: Status.UNAVAILABLE,
    Outcome.DROPPED: Status.UNAVAILABLE,
    Outcome.FAILED: Status.INTERNAL,
    Outcome.CANCELLED: Status.CANCELLED,
}


def unanswered(
    outcome: Outcome, query: int, version: str, reason: str, cause: LossCause | UnsetType = UNSET
) -> InferResult:
    """The result of a query that ended without outputs."""
    status = Status.TOO_MANY if cause is LossCause.RATE_LIMIT else _STATUS_OF[outcome]
    return InferResult(outcome, query, version, reason=reason, status=status)


def not_answered(result: InferResult, *, ready: bool) -> ServeError:
    """The error that tells a client of a query without an answer; a server that is not `ready` says UNSERVED."""
    if (refused := result.refusal) is not None:  # another one is raised: a traceback would hold frames with the result
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
    """Counters of one model version in the terms of the protocol's statistics extension."""

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
    """What is served, as front-ends tell it. Every method of these protocols is thread-safe, and raises ServeError."""

    def ready(self) -> bool:
        """Whether queries are accepted: started, not draining."""

    def model_ready(self, model: str, version: str) -> bool:
        """Whether this model (version "" means the default one) accepts queries. NOT_FOUND for an unknown name."""

    def metadata(self, model: str, version: str) -> ModelMetadata:
        """Describe one model; NOT_FOUND for an unknown one."""

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        """The model's configuration in the keys of the model configuration extension (`name`, `platform`, `backend`,
        `max_batch_size`, `input`, `output`, `dynamic_batching`...)."""


class Infer(Describe, Protocol):
    """What answers queries of the models that it describes."""

    def refusal(self, model: str, version: str) -> ServeError | None:
        """Why no query of this model is taken now, as far as that is known without one; None where it may be. For a
        request whose body is not read yet: quick, and changes nothing. What it gives may be out of date.
        """

    def refused(self, model: str, arrival_ns: int, error: ServeError) -> None:
        """A request is answered with an error and never gets a query: by what `refusal` said, or for want of room at
        the front-end. To be told once of each such request, whose first byte could be read at `arrival_ns`.
        """

    def submit(self, request: InferRequest, done: Callable[[InferResult], None]) -> int:
        """Take a query and return its number. `done` is called exactly once, from any thread, possibly before this
        method returns, and must be quick. Raises ServeError, without calling `done`, when the request itself is wrong
        (unknown model, missing or unknown input, wrong datatype or shape).
        """

    def cancel(self, query: int) -> None:
        """Withdraw a query; one that has ended already is left alone."""


class Control(Describe, Protocol):
    """What has a repository, counts, and may run a plan."""

    def live(self) -> bool:
        """Whether the process can answer at all."""

    def statistics(self, model: str, version: str) -> Sequence[ModelStatistics]:
        """Counters of one model, or of all when `model` is empty."""

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """The models of the repository, those that failed to load included."""

    def load(self, model: str) -> None:
        """Load or reload a model from the repository."""

    def unload(self, model: str) -> None:
        """Stop serving a model; its queued queries fail with a reason."""

    def metrics(self) -> bytes:
        """The metrics page in Prometheus' text format."""

    def plan(self) -> Mapping[str, Any]:
        """The plan that runs, and the rates that come: plain values. NOT_FOUND where no plan is served."""


class Backend(Infer, Control, Protocol):
    """The server as its front-ends see it."""

    def replied(self, result: InferResult) -> None:
        """An answer is handed to the connection now, or never will be. To be told once of each answered query of a
        request with an `arrival_ns`; queries that are not answered, or were withdrawn, need not be told of.
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
