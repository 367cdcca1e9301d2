"""The engine's output: actions that a driver carries out, in order."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType

from cotenant.types import LossCause, Outcome
from cotenant.work import Share, Work


class GroupBasis(Struct, frozen=True, gc=False, omit_defaults=True):
    """Basis of a launch that was predicted as a member of a group of launches that start together.

    `group` is the number of the group's first launch. `ahead`: the group was chosen while the group before it ran, so
    the decision takes no time when the group begins. `longest_ns` is an upper bound of the group's time where no group
    with that number of members was measured; else 0.
    """

    group: int
    ahead: bool = False
    longest_ns: int = 0


class Launch(Struct, frozen=True, gc=False, omit_defaults=True):
    """Run work of a batch in a share of a device, then hand back a LaunchEnded event with this id.

    A batch starts at unit 0 and keeps its intermediate tensors between launches until its last unit or a Release.
    `predicted_ns` is the predicted latency. `part`: several launches of the batch were decided together, each for a
    part of its rows or units. The batch continues with all rows when all of them have ended. `after` are the launches
    that had to end first. At the units in `stops` the launch can take the slots of an Expand. `basis` is a record of
    the policy's technique, which the core passes through and traces keep.
    """

    id: int
    batch: int
    queries: tuple[int, ...]
    work: Work
    last: bool
    share: Share
    predicted_ns: int
    part: bool = False
    after: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    basis: object = None


def group_of(launch: Launch) -> int:
    """The number of the first launch of the group that a launch was predicted with; its own where it is alone."""
    basis = launch.basis
    return basis.group if type(basis) is GroupBasis else launch.id


class Enqueue(Struct, frozen=True, gc=False):
    """A launch is decided and waits for the launches in `after`, each of which runs or was enqueued earlier.

    An executor that orders work on its device may submit the launch behind them now, without reporting its end. When
    they have ended, Launch with the same number follows, perhaps for fewer queries. From then on the launch runs and
    hands back LaunchEnded. If all queries of its batch end before, the launch never runs: Release of the batch follows,
    after the last running launch of that batch.
    """

    launch: Launch


class Respond(Struct, frozen=True, gc=False):
    """A query has ended. Sent exactly once per query; `reason` is empty for answers in time.

    `cause` is why the query was lost, `culprit` the tenant for which it was shed. Both are unset where the engine does
    not know them at once; `trace.lost` finds them later.
    """

    query: int
    outcome: Outcome
    reason: str = ""
    cause: LossCause | UnsetType = UNSET
    culprit: str | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Release:
    """A batch will not be resumed: its intermediate tensors can go."""

    batch: int


@dataclass(frozen=True, slots=True)
class Expand:
    """Let a running launch continue in this larger share from its next stop on, and hand back LaunchExpanded there.

    If the executor cannot, or no stop is left, nothing changes: the launch holds the slots until its end.
    """

    launch: int
    share: Share


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Hand back a TimerFired event at this time. Replaces the timer set before."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Hand back a LookAheadDue event as soon as the launches before this action are on their way."""


class PolicyFault(Struct, frozen=True, gc=False, omit_defaults=True):
    """A policy failed in this event: log the fault and count it; nothing else is to do.

    `call` is the method that failed: `decide`, or `queue_key` for the query `query` (else -1). `reason` is the
    exception or the error in the result. The result is replaced by earliest deadline first. With `falls_back` the
    fallback policy serves from now on, until a policy is set.
    """

    policy: str
    call: str
    reason: str
    query: int = -1
    falls_back: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """A query runs as a probe although its model is predicted to take `predicted_ns`, more than its SLO: count it.

    See `core.probes`.
    """

    query: int
    predicted_ns: int


Action = Launch | Enqueue | Expand | Respond | Release | SetTimer | LookAhead | PolicyFault | Probe
