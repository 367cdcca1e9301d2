"""Driver of the simulator: a discrete-event loop that runs the engine against a world, in virtual time.

It differs from the server's driver only in clock, ingress and executor. An enqueued launch begins when it starts.
Events of one instant have a fixed order: expansions of launches, ends of launches, the timer, arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from cotenant.core.actions import Action, Expand, GroupBasis, Launch, LookAhead, Respond, SetTimer
from cotenant.core.events import Event, LaunchEnded, LaunchExpanded, LookAheadDue, QueryArrived, TimerFired
from cotenant.core.snapshot import Policy
from cotenant.errors import ProtocolViolationError
from cotenant.types import Query
from cotenant.world.simulated import World

_NEVER = 1 << 62
_TIMER = TimerFired()
_LOOK_AHEAD = LookAheadDue()

OnRespond = Callable[[Respond, int], None]
Log = Callable[[int, Event, list[Action]], None]


class Driven(Protocol):
    """The part of an engine that the driver uses."""

    @property
    def policy(self) -> Policy:
        """The policy that decides."""
        ...

    @property
    def live(self) -> int:
        """Number of queries that have not ended."""
        ...

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Handle an event; return the actions that it causes."""
        ...


def simulate(
    engine: Driven,
    world: World,
    queries: Iterable[Query],
    on_respond: OnRespond,
    *,
    decision_ns: int = 0,
    log: Log | None = None,
) -> int:
    """Run all queries, in order of arrival, to their ends; return the time of the last event in ns.

    `decision_ns` is the time of a decision on the simulated machine, charged before each launch. A group that was
    chosen while another one ran is charged only the rest of that time at the end of the other group.
    `log` gets each event with its actions. Raises ProtocolViolationError if a query never ends.
    """
    source = iter(queries)
    query = next(source, None)
    arrival = query.arrival_ns if query is not None else _NEVER
    timer = _NEVER
    end = _NEVER
    now = 0
    handle = engine.handle
    moved = False
    event: Event
    is_looking_ahead = False
    thinking_until = 0
    start, next_ns, pop = world.start, world.next_ns, world.pop
    while True:
        if is_looking_ahead:
            is_looking_ahead, event = False, _LOOK_AHEAD
            thinking_until = max(thinking_until, now) + decision_ns
        elif end <= timer and end <= arrival:
            if end == _NEVER:
                break
            now = end
            number, error, expanded = pop()
            moved = True
            event = LaunchExpanded(number) if expanded else LaunchEnded(number, error)
        elif timer <= arrival:
            now, event, timer = timer, _TIMER, _NEVER
        else:
            if query is None:
                raise ProtocolViolationError("an arrival is due, but there is no query")
            now, event = arrival, QueryArrived(query)
            query = next(source, None)
            arrival = query.arrival_ns if query is not None else _NEVER
        actions = handle(event, now)
        for action in actions:
            kind = type(action)
            if kind is Respond:
                on_respond(action, now)  # type: ignore[arg-type]
            elif kind is Launch:
                begin, basis = now + decision_ns, action.basis  # type: ignore[union-attr]
                if type(basis) is GroupBasis and basis.ahead:
                    begin = max(now, thinking_until)
                start(action, begin)  # type: ignore[arg-type]
                moved = True
            elif kind is SetTimer:
                timer = action.at_ns  # type: ignore[union-attr]
            elif kind is LookAhead:
                is_looking_ahead = True
            elif kind is Expand:
                world.expand(action.launch, action.share, now)  # type: ignore[union-attr, arg-type]
                moved = True
        if log is not None:
            log(now, event, actions)
        if moved:
            moved = False
            upcoming = next_ns()
            end = _NEVER if upcoming is None else upcoming
    if engine.live:
        raise ProtocolViolationError(
            f"{engine.live} queries never ended: policy {engine.policy.spec.name!r} leaves work undone"
        )
    return now
