"""What the core asks of the world."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType

from cotenant.types import LossCause, Outcome
from cotenant.work import Share, Work


class GroupBasis(Struct, frozen=True, gc=False, omit_defaults=True):
    """The basis of a launch that was predicted as a member of a group of launches that start together.

    `group` is the number of the group's first launch. `ahead` says that the group was chosen while the one before it
    was running, so that the decision takes no time when it begins. `longest_ns` is what the group takes at most, where
    no group of so many members was measured; else 0.
    """

    group: int
    ahead: bool = False
    longest_ns: int = 0


class Launch(Struct, frozen=True, gc=False, omit_defaults=True):
    """Run work of a batch in a share of a device, then hand back a LaunchEnded event with this id.

    A batch starts at unit 0 and keeps its intermediate tensors between launches until its last unit or a Release.
    `predicted_ns` is what the decision believed. `part` says that it is one of several launches of its batch that are
    decided together, each of which runs a part of its rows or of its units; when all have ended it goes on with all its
    rows. `after` are launches that had to end before this one could start. At the units in `stops`, in between, it can
    take in slots of a Grow. `basis` is what else the policy's technique knew of it, a record of the technique's own:
    the core passes it through, and traces keep it.
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
    """This launch is decided and waits for those in `after`, each of which runs or was enqueued before it.

    An executor that orders work on its device may submit it behind them now, and say nothing of its end. Launch with
    the same number follows when they have ended, perhaps for fewer of its queries: from then on it runs, and hands back
    LaunchEnded. Where nobody waits for its batch any more it never runs: then Release of the batch follows, at once or,
    where launches of that batch run beside it, when the last of them has ended.
    """

    launch: Launch


class Respond(Struct, frozen=True, gc=False):
    """A query has ended. Sent exactly once per query; `reason` is empty for answers in time.

    `cause` says why it was lost where that is known at once, `culprit` the tenant that it was given up for; else
    `trace.lost` finds them in what happened to it.
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
class Grow:
    """Let a launch under way go on in this larger share from its next stop on; hand back LaunchGrew there.

    An executor that cannot, or a launch without a stop before it, leaves it at that: the slots are its own to its end.
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
    """A policy has failed in the event that this action is of: log it, and count it. It asks for nothing else.

    `call` is what was asked of it: `decide`, or `queue_key` for `query`, which is -1 else. `reason` is the exception,
    or what is wrong with the result. What it was asked for is by deadline instead. With `falls_back` the fallback
    serves from now on, until another policy is set, or this one anew.
    """

    policy: str
    call: str
    reason: str
    query: int = -1
    falls_back: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """A query runs although its model is predicted to take `predicted_ns`, more than its SLO: count it.

    See `core.probes`. It asks for nothing else.
    """

    query: int
    predicted_ns: int


Action = Launch | Enqueue | Grow | Respond | Release | SetTimer | LookAhead | PolicyFault | Probe
