"""Whether the records of a log follow from each other: a log with a gap, or with a line of other fields, is refused.

Readers then need no check of their own: what a record refers to is in a record before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import convert

from cotenant.core.actions import Action, Enqueue, Grow, Launch, Respond
from cotenant.core.events import LaunchEnded, LaunchGrew, QueryArrived
from cotenant.errors import CotenantError

_ACTIONS: Mapping[str, type[Action]] = {each.__name__: each for each in Action.__args__}


class GapError(CotenantError):
    """A record does not follow from those before it; its text ends a sentence that names the line."""


class RecordCheck:
    """Takes the records of a log in turn, and knows which queries are inside and which launches run.

    `time_ns` of the records never falls. Raises GapError, and msgspec.ValidationError for an action of other fields.
    """

    def __init__(self) -> None:
        self._now_ns = 0
        self._last_query = -1
        self._tenant_of: dict[int, str] = {}
        self._running: dict[int, str] = {}
        self._grows: set[int] = set()

    def __call__(self, time_ns: int, event: object, actions: list[tuple[str, dict[str, Any]]]) -> None:
        """Check one record; `event` is decoded."""
        if time_ns < self._now_ns:
            raise GapError(f"its time is {time_ns} ns, expected at least {self._now_ns} ns, that of the line before")
        self._now_ns = time_ns
        if isinstance(event, QueryArrived):
            query = event.query
            if query.id <= self._last_query:
                raise GapError(f"query {query.id} arrives, expected a number above {self._last_query}")
            self._last_query = query.id
            self._tenant_of[query.id] = query.tenant
        elif isinstance(event, LaunchGrew):
            if event.launch not in self._grows:
                raise GapError(f"launch {event.launch} has grown, but no line before asks for that")
            self._grows.remove(event.launch)
        elif isinstance(event, LaunchEnded):
            if self._running.pop(event.launch, None) is None:
                raise GapError(f"launch {event.launch} has ended, but no line before starts it")
            self._grows.discard(event.launch)
        for kind, action in actions:
            if kind not in _ACTIONS:
                raise GapError(f"an action is of the unknown kind {kind!r}, expected one of {', '.join(_ACTIONS)}")
            self._acted(convert(action, _ACTIONS[kind]))

    def _acted(self, action: Action) -> None:
        if isinstance(action, Launch):
            if action.id in self._running:
                raise GapError(f"launch {action.id} starts, but it is running")
            self._check_queries(action)
            self._running[action.id] = action.work.tenant
        elif isinstance(action, Enqueue):
            self._check_queries(action.launch)
        elif isinstance(action, Grow):
            if action.launch not in self._running:
                raise GapError(f"launch {action.launch} is to grow, but it is not running")
            self._grows.add(action.launch)
        elif isinstance(action, Respond) and self._tenant_of.pop(action.query, None) is None:
            raise GapError(f"query {action.query} is answered, but no line before says that it arrived and waits")

    def _check_queries(self, launch: Launch) -> None:
        for number in launch.queries:
            if self._tenant_of.get(number) != launch.work.tenant:
                raise GapError(
                    f"launch {launch.id} is of query {number}, but no line before says that it arrived "
                    f"for {launch.work.tenant!r} and waits"
                )
