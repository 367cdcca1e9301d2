"""The engine's input: events. Their order is the order in which a driver hands them over."""

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
    """A query arrived. Its id is larger than every id before it.

    With `more`, another query of the same arrival follows at once: the engine decides after the last one.
    """

    query: Query
    more: bool = False


class LaunchEnded(Struct, frozen=True, gc=False):
    """An executor ended a launch; `error` says why it failed, None that it did not.

    Two fields are for traces alone. `task_times` are the times of the tasks of a placed launch. `steal_ns` is the time
    for which other processes had the core of its thread, where that is known.
    """

    launch: int
    error: str | None = None
    task_times: tuple[TaskTime, ...] | UnsetType = UNSET
    steal_ns: int | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class LaunchExpanded:
    """A launch continues in the share of its Expand. Comes before its LaunchEnded, if at all."""

    launch: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of the last SetTimer action was reached."""


@dataclass(frozen=True, slots=True)
class QueryCancelled:
    """The client withdrew a query. No effect on unknown and ended queries."""

    query: int
    reason: ClassVar[str] = "cancelled by the client"


@dataclass(frozen=True, slots=True)
class QueryWithdrawn:
    """The application query of a stage has ended, so the stage's query is not needed. Otherwise like a cancel."""

    query: int
    reason: str


@dataclass(frozen=True, slots=True)
class ApplicationArrived:
    """An application query arrived; it shares the numbers of queries. For traces and observers: its stages are
    queries. `predicted_ns` is the predicted latency of a probe, above the SLO (`core.flow.FlowProbes`)."""

    query: int
    application: str
    arrival_ns: int
    deadline_ns: int
    predicted_ns: int | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class ApplicationEnded:
    """An application query ended at `ended_ns` with its one outcome. For traces and observers."""

    query: int
    outcome: Outcome
    reason: str
    ended_ns: int


@dataclass(frozen=True, slots=True)
class QueryRefused:
    """A request that arrived at `arrival_ns` was refused before it became a query.

    Without a `cause` its tenant's queue was full: the engine counts the request as demand and as lost. `trace.lost`
    then finds the cause in the delays of the tenant's queries.
    """

    tenant: str
    arrival_ns: int
    cause: LossCause | UnsetType = UNSET
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AnswerLate:
    """A query was answered in time, but the response was written late, at `written_ns`. For traces and observers."""

    query: int
    tenant: str
    arrival_ns: int
    written_ns: int


@dataclass(frozen=True, slots=True)
class ModelOpening:
    """Model loading began, or ended (`done`): until then launches share the cores with it. For traces and observers."""

    model: str
    done: bool = False


@dataclass(frozen=True, slots=True)
class TenantAdded:
    """A tenant may send queries from now on. A known name is an error: remove it first."""

    tenant: Tenant


@dataclass(frozen=True, slots=True)
class TenantRemoved:
    """A tenant was removed; its live queries fail with `reason`."""

    tenant: str
    reason: str


@dataclass(frozen=True, slots=True)
class PredictorChanged:
    """Decisions use another predictor from now on."""

    predictor: Predictor


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """Another policy decides from now on. Waiting queries get its keys; batches and launches continue unchanged. Its
    lanes must be shares of the machine."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """New queries are refused from now on; live queries are served."""


@dataclass(frozen=True, slots=True)
class TenantSuspended:
    """A tenant's worker died: no launch of the tenant starts until TenantResumed. Queries of paused batches return to
    the queue. Each running launch still ends with a LaunchEnded."""

    tenant: str
    reason: str


@dataclass(frozen=True, slots=True)
class TenantChanged:
    """A tenant's model was replaced by one that takes the same queries; no launch starts until TenantResumed.

    Batches in their last launches end as before. The queries of all other batches return to the queue, for the new
    model. Between this event and TenantResumed comes one PredictorChanged, and nothing else.
    """

    tenant: Tenant


@dataclass(frozen=True, slots=True)
class TenantResumed:
    """A suspended tenant can be served again. No effect on other tenants."""

    tenant: str


@dataclass(frozen=True, slots=True)
class LookAheadDue:
    """Answer to the action LookAhead: choose the next group while the present one runs."""


MOMENTS: Mapping[type, Moment] = {QueryArrived: Moment.ARRIVAL, LookAheadDue: Moment.LOOK_AHEAD}
"""Moments of a policy by event type; all other types are `Moment.OTHER`."""

Event = (
    QueryArrived
    | LaunchEnded
    | LaunchExpanded
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
