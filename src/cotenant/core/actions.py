"""What the core asks of the world."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from cotenant.types import Outcome
from cotenant.work import Share, Work


class Launch(Struct, frozen=True, gc=False):
    """Run work of a batch in a share of a device, then hand back a LaunchEnded event with this id.

    A batch starts at unit 0 and keeps its intermediate tensors between launches until its last unit or a Release.
    `predicted_ns` is what the decision believed; `headroom_ns` is what was left of the most urgent query's time then.
    Launches of one `group` start together. `ahead` says that it was chosen while the group before it was running.
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


class Respond(Struct, frozen=True, gc=False):
    """A query has ended. Sent exactly once per query; `reason` is empty for answers in time."""

    query: int
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """A batch will not be resumed: its intermediate tensors can go."""

    batch: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Hand back a TimerFired event at this time. Replaces the timer set before."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Hand back a PlanDue event as soon as the launches before this action are on their way."""


Action = Launch | Respond | Release | SetTimer | Plan
