"""Consistency check of the records of a trace: each record has to follow from those before it.

It refuses a gap without an `EventsMissing` record, and a line with wrong fields. Readers then need no checks of their
own: a query or launch that an action names is in an earlier record.
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
    """A gap in a trace, in place of an event: the writer dropped this number of events, as it could not keep up.

    Readers forget earlier queries and launches, since their ends are not known.
    """

    events: int


@dataclass(frozen=True, slots=True)
class OthersTook:
    """Time of all cores of the server in ns since the last such record, and the part that others took. In place of an
    event; the host counts as another process."""

    cores_ns: int
    others_ns: int


class GapError(CotenantError):
    """A record does not follow from those before it. The text ends a sentence that names the line."""


class RecordCheck:
    """Checks records in their order; keeps the pending queries and the running launches.

    `time_ns` must not decrease. After an EventsMissing, actions on earlier queries or launches are left out, and
    launches keep their other queries.
    Raises GapError, and msgspec.ValidationError for an action with wrong fields.
    """

    def __init__(self) -> None:
        self._now_ns = 0
        self._last_query = -1
        self._tenant_of: dict[int, str] = {}
        self._running: dict[int, str] = {}
        self._expanding: set[int] = set()
        self._has_gap = False

    def __call__(self, time_ns: int, event: object, actions: list[_Plain]) -> list[_Plain]:
        """Check a record, with its decoded event; return its actions without those on queries lost in a gap."""
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
                raise GapError(f"query {query.id} arrives, expected an id above {self._last_query}")
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
        """Whether an action is on a query or launch from before a gap."""
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
            raise GapError(f"query {action.query} ends, but no line before says that it arrived and waits")

    def _check_queries(self, launch: Launch) -> None:
        for number in launch.queries:
            if self._tenant_of.get(number) != launch.work.tenant:
                raise GapError(
                    f"launch {launch.id} has query {number}, but no line before says that it arrived "
                    f"for {launch.work.tenant!r} and waits"
                )
