"""What the core asks of the world."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType

from cotenant.types import LossCause, Outcome
from cotenant.work import Share, Work


class Launch(Struct, frozen=True, gc=False, omit_defaults=True):
    """Run work of a batch in a share of a device, then hand back a LaunchEnded event with this id.

    A batch starts at unit 0 and keeps its intermediate tensors between launches until its last unit or a Release.
    `predicted_ns` is what the decision believed; `headroom_ns` is what was left of the most urgent query's time then.
    Launches of one `group` are decided together, and where a policy says which start together in a partition they are
    those. `ahead` says that it was chosen while the group before it was running.
    `part` says that it is one of several launches of its batch that are decided together, each of which runs a part of
    its rows or of its units; when all have ended it goes on with all its rows. `after` are launches that had to end
    before this one could start. At the units in `stops`, in between, it can take in slots of a Grow. `wanted` is the
    size of the share that it was to have where fewer slots were free; 0 where it has what it was to have.
    `pressure_pct` is the pressure on the memory that its time was predicted at, in per cent. `longest_ns` is what
    its group takes at most where none of so many members was measured, else 0.
    """

    id: int
    batch: int
    queries: tuple[int, ...]
    work: Work
    last: bool
    share: Share
    predicted_ns: int
    headroom_ns: int
    group: int = 0
    ahead: bool = False
    part: bool = False
    after: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    wanted: int = 0
    pressure_pct: int = 0
    longest_ns: int = 0


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

    `cause` says why it was lost where that is known at once, `whom` the tenant that it was given up for; else
    `trace.lost` finds them in what happened to it.
    """

    query: int
    outcome: Outcome
    reason: str = ""
    cause: LossCause | UnsetType = UNSET
    whom: str | UnsetType = UNSET


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
