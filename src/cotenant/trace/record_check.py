"""Whether the records of a log follow from each other: a log with a gap that it does not tell of, or with a line of
other fields, is refused.

Readers then need no check of their own: what an action refers to is in a record before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import convert

from cotenant.core.actions import Action, Enqueue, Expand, Launch, Respond
from cotenant.core.events import LaunchEnded, LaunchExpanded, QueryArrived
from cotenant.errors import CotenantError

_ACTIONS: Mapping[str, type[Action]] = {each.__name__: each for each in Action.__args__}
_Plain = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class EventsMissing:
    """A gap in a log: its writer could not keep up, and so many events are not in it. Stands in place of an event.

    Readers forget the queries and the launches of before: how these ended is not known.
    """

    events: int


class GapError(CotenantError):
    """A record does not follow from those before it; its text ends a sentence that names the line."""


class RecordCheck:
    """Takes the records of a log in turn, and knows which queries are inside and which launches run.

    `time_ns` of the records never falls. From an EventsMissing on it knows of none that were there before: actions that
    are about those alone are left out, and launches keep their other queries.
    Raises GapError, and msgspec.ValidationError for an action of other fields.
    """

    def __init__(self) -> None:
        self._now_ns = 0
        self._last_query = -1
        self._tenant_of: dict[int, str] = {}
        self._running: dict[int, str] = {}
        self._expanding: set[int] = set()
        self._has_gap = False

    def __call__(self, time_ns: int, event: object, actions: list[_Plain]) -> list[_Plain]:
        """Check one record, of which `event` is decoded; give its actions without those of what is not known."""
        if time_ns < self._now_ns:
            raise GapError(f"its time is {time_ns} ns, expected at least {self._now_ns} ns, that of the line before")
        self._now_ns = time_ns
        if isinstance(event, EventsMissing):
            self._has_gap = True
            for known in (self._tenant_of, self._running, self._expanding):
                known.clear()
        elif isinstance(event, QueryArrived):
            query = event.query
            if query.id <= self._last_query:
                raise GapError(f"query {query.id} arrives, expected a number above {self._last_query}")
            self._last_query = query.id
            self._tenant_of[query.id] = query.tenant
        elif isinstance(event, LaunchExpanded):
            if event.launch not in self._expanding and not self._has_gap:
                raise GapError(f"launch {event.launch} has expanded, but no earlier line of the trace decided that")
            self._expanding.discard(event.launch)
        elif isinstance(event, LaunchEnded):
            if self._running.pop(event.launch, None) is None and not self._has_gap:
                raise GapError(f"launch {event.launch} has ended, but no line before starts it")
            self._expanding.discard(event.launch)
        kept = []
        for kind, action in actions:
            if kind not in _ACTIONS:
                raise GapError(f"an action is of the unknown kind {kind!r}, expected one of {', '.join(_ACTIONS)}")
            made = convert(action, _ACTIONS[kind])
            if self._has_gap:
                if self._is_of_before(made):
                    continue
                if isinstance(made, Launch | Enqueue):
                    launch = action if isinstance(made, Launch) else action["launch"]
                    launch["queries"] = [each for each in launch["queries"] if each in self._tenant_of]
                    made = convert(action, _ACTIONS[kind])
            self._acted(made)
            kept.append((kind, action))
        return kept

    def _is_of_before(self, action: Action) -> bool:
        """Whether an action is of a query or a launch that was there before a gap."""
        if isinstance(action, Respond):
            return action.query not in self._tenant_of
        return isinstance(action, Expand) and action.launch not in self._running

    def _acted(self, action: Action) -> None:
        if isinstance(action, Launch):
            if action.id in self._running:
                raise GapError(f"launch {action.id} starts, but it is running")
            self._check_queries(action)
            self._running[action.id] = action.work.tenant
        elif isinstance(action, Enqueue):
            self._check_queries(action.launch)
        elif isinstance(action, Expand):
            if action.launch not in self._running:
                raise GapError(f"launch {action.launch} is to expand, but it does not run")
            self._expanding.add(action.launch)
        elif isinstance(action, Respond) and self._tenant_of.pop(action.query, None) is None:
            raise GapError(f"query {action.query} is answered, but no line before says that it arrived and waits")

    def _check_queries(self, launch: Launch) -> None:
        for number in launch.queries:
            if self._tenant_of.get(number) != launch.work.tenant:
                raise GapError(
                    f"launch {launch.id} is of query {number}, but no line before says that it arrived "
                    f"for {launch.work.tenant!r} and waits"
                )
