"""What can happen to the core. The order of events is the order in which a driver hands them over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from msgspec import UNSET, Struct, UnsetType

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Moment, Policy
from cotenant.types import LossCause, Outcome, Query, Tenant
from cotenant.work import TaskTime


class QueryArrived(Struct, frozen=True, gc=False, omit_defaults=True):
    """A query came in. Its id is new and larger than every id before it.

    With `more`, another one that came in with it follows at once: nothing is decided between the two.
    """

    query: Query
    more: bool = False


class LaunchEnded(Struct, frozen=True, gc=False):
    """An executor ended a launch; `error` says why it failed, None that it did not.

    For traces alone, decisions do not see them: `task_times` are the times of the tasks of a placed launch, `steal_ns`
    is the time for which other processes had the core of its thread, where that is known.
    """

    launch: int
    error: str | None = None
    task_times: tuple[TaskTime, ...] | UnsetType = UNSET
    steal_ns: int | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class LaunchGrew:
    """A launch goes on in the share of its Grow. Comes before its end, if at all."""

    launch: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of the last SetTimer action has come."""


@dataclass(frozen=True, slots=True)
class QueryCancelled:
    """The client withdrew a query. Unknown and ended queries are left alone."""

    query: int
    reason: ClassVar[str] = "cancelled by the client"


@dataclass(frozen=True, slots=True)
class QueryWithdrawn:
    """Nobody waits for a query any more: the application that it is a stage of has ended. Otherwise as a cancel."""

    query: int
    reason: str


@dataclass(frozen=True, slots=True)
class ApplicationArrived:
    """An application's query came in; its number is one of a query. For those who look on: its stages are queries."""

    query: int
    application: str
    arrival_ns: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class ApplicationEnded:
    """An application's query has ended, at `ended_ns`, with its one outcome. For those who look on."""

    query: int
    outcome: Outcome
    reason: str
    ended_ns: int


@dataclass(frozen=True, slots=True)
class QueryRefused:
    """A request for a model or application came in at `arrival_ns` and never became a query.

    Without a `cause` it was refused as the queue of its tenant was full, before its body was read: what delayed it is
    the cause, and the tenant's account has it as an arrival that is lost.
    """

    tenant: str
    arrival_ns: int
    cause: LossCause | UnsetType = UNSET
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AnswerLate:
    """A query's answer was there in time, and was written at `written_ns`, too late. For those who look on."""

    query: int
    tenant: str
    arrival_ns: int
    written_ns: int


@dataclass(frozen=True, slots=True)
class ModelOpening:
    """A model is being opened from now on, or no more (`done`): what runs meanwhile shares the cores with that. For
    those who look on."""

    model: str
    done: bool = False


@dataclass(frozen=True, slots=True)
class TenantAdded:
    """A tenant may send queries from now on. Adding a known name is an error: remove it first."""

    tenant: Tenant


@dataclass(frozen=True, slots=True)
class TenantRemoved:
    """A tenant is gone; its live queries fail with `reason`."""

    tenant: str
    reason: str


@dataclass(frozen=True, slots=True)
class PredictorChanged:
    """Decisions from now on believe another predictor."""

    predictor: Predictor


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """Another policy decides from now on. Queries wait on under its keys, launches under way end as they would have,
    and batches that have begun go on. Its lanes must be cores of the device."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """New queries are refused from now on; those inside are served."""


@dataclass(frozen=True, slots=True)
class TenantSuspended:
    """What runs a tenant's model has died: nothing of it is launched until TenantResumed. Queries wait on, and those of
    paused batches wait again. Launches under way still end, each with a LaunchEnded of its own."""

    tenant: str
    reason: str


@dataclass(frozen=True, slots=True)
class TenantChanged:
    """A tenant's model is another one, which takes the same queries. Nothing of it is launched until TenantResumed.

    Batches whose launches under way are their last ones end as they would have. The queries of all others wait, or wait
    again, for the new model. Comes with a PredictorChanged between it and TenantResumed, and nothing else.
    """

    tenant: Tenant


@dataclass(frozen=True, slots=True)
class TenantResumed:
    """A suspended tenant can be served again. Others, and unknown ones, are left alone."""

    tenant: str


@dataclass(frozen=True, slots=True)
class LookAheadDue:
    """There is time to choose the next group while the present one runs: the answer to the action LookAhead."""


MOMENTS: Mapping[type, Moment] = {QueryArrived: Moment.ARRIVAL, LookAheadDue: Moment.LOOK_AHEAD}
"""What events are to a policy; all others are `Moment.OTHER`."""

Event = (
    QueryArrived
    | LaunchEnded
    | LaunchGrew
    | TimerFired
    | QueryCancelled
    | TenantAdded
    | TenantRemoved
    | PredictorChanged
    | DrainStarted
    | TenantSuspended
    | TenantChanged
    | TenantResumed
    | LookAheadDue
    | PolicyChanged
    | QueryWithdrawn
    | ApplicationArrived
    | ApplicationEnded
    | QueryRefused
    | AnswerLate
    | ModelOpening
)
