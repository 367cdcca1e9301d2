"""State machine of one application query: which stages start after an answer, and how the whole query ends.

Pure: no clock, no thread, no tensors. The server, the simulator and the gateway of a cluster carry out its steps and
report how each stage ended. Invariants: a flow ends exactly once. A stage starts at most once, after all stages that it
needs were answered. Every stage that runs when the flow ends is withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from types import MappingProxyType

from msgspec import UNSET

from cotenant.core.events import ApplicationArrived, ApplicationEnded, QueryWithdrawn
from cotenant.core.probes import Probes
from cotenant.errors import InvalidValueError, ProtocolViolationError
from cotenant.types import ANSWERS, Outcome, Query, StageQuery

ShapedRows = tuple[int, int]
"""Declared shape and rows of a stage's query."""

AloneNs = Callable[[int, int, int], int]
"""Predicted latency in ns of a stage that runs alone, from its number, declared shape and rows."""

_UNKNOWN: Mapping[int, ShapedRows] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The DAG of an application's stages in topological order: `after[i]` are the stages that stage i needs.

    `share_ends_ns`: end of each stage's SLO budget in ns after the arrival, where a plan divides the SLO. `smallest`:
    number of the smallest declared shape of each stage's model; empty where that is the first one.

    Raises InvalidValueError when there is no stage, or one needs itself, a later one or one that is not there.
    """

    names: tuple[str, ...]
    after: tuple[tuple[int, ...], ...]
    share_ends_ns: tuple[int, ...] | None = None
    smallest: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.after):
            raise InvalidValueError("stage graph", "names", self.names, "one name for each entry of after, at least 1")
        for number, needed in enumerate(self.after):
            if any(not 0 <= other < number for other in needed):
                raise InvalidValueError("stage graph", "after", needed, f"numbers of stages before stage {number}")

    def needed(self, wanted: Iterable[int]) -> tuple[bool, ...]:
        """Per stage, whether it is wanted or a predecessor of a wanted stage."""
        found = [False] * len(self.names)
        for number in wanted:
            found[number] = True
        for number in range(len(found) - 1, -1, -1):
            if found[number]:
                for other in self.after[number]:
                    found[other] = True
        return tuple(found)

    def rest_ns(self, times_ns: Sequence[int]) -> tuple[int, ...]:
        """Per stage, the time of the longest path of stages after it, from `times_ns` of each stage."""
        rest = [0] * len(self.names)
        for number in range(len(rest) - 1, -1, -1):
            for other in self.after[number]:
                rest[other] = max(rest[other], rest[number] + times_ns[number])
        return tuple(rest)

    def ends_ns(self, shares_ns: Sequence[int]) -> tuple[int, ...]:
        """Per stage, the end of its SLO budget in ns after the arrival: the longest path of budgets up to it."""
        ends: list[int] = []
        for number, needed in enumerate(self.after):
            ends.append(max((ends[other] for other in needed), default=0) + shares_ns[number])
        return tuple(ends)

    def divided(self, shares_ns: Mapping[str, int]) -> StageGraph:
        """The graph with a plan's SLO budgets by stage; without budgets if the names are not exactly the stages."""
        fits = sorted(shares_ns) == sorted(self.names)
        ends_ns = self.ends_ns([shares_ns[name] for name in self.names]) if fits else None
        return replace(self, share_ends_ns=ends_ns)

    def works(self, rows: int, known: Mapping[int, ShapedRows] = _UNKNOWN) -> list[ShapedRows]:
        """Per stage, shape and rows of its query: from `known`, else `rows` rows of the smallest declared shape.

        The smallest shape gives a lower bound of the latency for any output of earlier stages.
        """
        smallest = self.smallest or (0,) * len(self.names)
        return [known.get(number, (shape, rows)) for number, shape in enumerate(smallest)]


@dataclass(frozen=True, slots=True)
class StartStages:
    """Let the queries of these stages of the application query `query` arrive together, and report how each ends."""

    query: int
    stages: tuple[int, ...]


Step = StartStages | ApplicationEnded | QueryWithdrawn
"""Steps that the owner of a flow carries out, in order. The last two are events for the engine."""


class StageState(IntEnum):
    """State of a stage."""

    WAITING = auto()
    RUNNING = auto()
    ANSWERED = auto()
    OVER = auto()
    """Ended without an answer, withdrawn, or never to start."""


_WAITING, _RUNNING, _ANSWERED, _OVER = StageState
"""Looking a member up in its enumeration costs 0.1 us in Python 3.11."""


class Flow:
    """The state of one application query. Not thread-safe: the owner serialises the calls.

    `query` is the whole query, with the application as its tenant. The stages in `wanted` (default: all) and their
    predecessors run. `known` has shape and rows of the stages with inputs that are known at the arrival.

    `deadlines_ns` has a deadline for each stage. With a plan that is the end of the stage's SLO budget. Else it is the
    query's deadline minus the longest path of later stages, by `alone_ns`. A stage that misses its own deadline does
    not end the flow.
    """

    __slots__ = (
        *("_expiry_ns", "_left", "_numbers", "deadlines_ns", "graph", "is_over", "predicted_ns", "query", "states"),
        "works",
    )

    def __init__(
        self,
        graph: StageGraph,
        query: Query,
        alone_ns: AloneNs,
        known: Mapping[int, ShapedRows] = _UNKNOWN,
        wanted: Iterable[int] | None = None,
    ) -> None:
        self.graph, self.query = graph, query
        runs = graph.needed(range(len(graph.names)) if wanted is None else wanted)
        self.works = graph.works(query.items, known)
        if graph.share_ends_ns is not None:
            self.deadlines_ns = [min(query.deadline_ns, query.arrival_ns + end) for end in graph.share_ends_ns]
        else:
            times = [alone_ns(number, *work) if runs[number] else 0 for number, work in enumerate(self.works)]
            self.deadlines_ns = [query.deadline_ns - rest for rest in graph.rest_ns(times)]
        self.states = [_WAITING if each else _OVER for each in runs]
        self.predicted_ns = 0
        """Predicted latency of a probe; 0 for other queries."""
        self._expiry_ns = query.expiry_ns
        self.is_over = False
        self._left = sum(runs)
        self._numbers: dict[int, int] = {}
        """Numbers of the arrived stage queries, by stage."""

    @property
    def arrived(self) -> ApplicationArrived:
        """The event for the trace and for observers."""
        query = self.query
        return ApplicationArrived(
            query.id, query.tenant, query.arrival_ns, query.deadline_ns, self.predicted_ns or UNSET
        )

    def run_as(self, probe: Query, predicted_ns: int) -> None:
        """Run as a probe before `begin`: stages have its late deadline, and end at the query's own one."""
        self._expiry_ns, self.predicted_ns = probe.expiry_ns, predicted_ns
        self.deadlines_ns = [probe.deadline_ns] * len(self.deadlines_ns)

    def begin(self) -> list[Step]:
        """Start the stages that need no other stage."""
        return self._start([number for number, needed in enumerate(self.graph.after) if not needed])

    def stage_query(
        self, stage: int, number: int, tenant: str, now_ns: int, items: int, shape: int, merge_key: int
    ) -> StageQuery:
        """The query of a started stage, which arrives now. Raises ProtocolViolationError for a stage not started."""
        self._check(stage, "arrives")
        query, self._numbers[stage] = self.query, number
        return StageQuery(
            number,
            tenant,
            now_ns,
            self.deadlines_ns[stage],
            query.rank,
            items,
            shape,
            merge_key,
            self._expiry_ns,
            query.id,
            self.graph.names[stage],
        )

    @property
    def awaited(self) -> set[int]:
        """Stages that a stage which has not started needs."""
        states = self.states
        return {
            other for number, needed in enumerate(self.graph.after) if states[number] is _WAITING for other in needed
        }

    def fit(self, alone_ns: AloneNs) -> tuple[int, int]:
        """Predicted latency of the query alone, in ns, and the latency with which the query would fit.

        The first is the longest path of stages, at the smallest shapes. The second is at most the SLO. A stage that
        exceeds its SLO budget by a factor reduces it by this factor.
        """
        graph, query = self.graph, self.query
        times = [alone_ns(number, *work) for number, work in enumerate(graph.works(query.items))]
        ends = graph.share_ends_ns
        predicted_ns = max(graph.ends_ns(times))
        fits_ns = min(predicted_ns, query.deadline_ns - query.arrival_ns)
        if ends is not None:
            budgets = [end - max([ends[other] for other in graph.after[at]], default=0) for at, end in enumerate(ends)]
            fits_ns = min(
                [fits_ns, *(predicted_ns * each // max(1, time) for each, time in zip(budgets, times, strict=True))]
            )
        return predicted_ns, fits_ns

    def stage_ended(self, stage: int, outcome: Outcome, reason: str, now_ns: int) -> list[Step]:
        """Take the end of a started stage; no steps follow after the end of the whole.

        Raises ProtocolViolationError for a stage that does not run.
        """
        if self.is_over:
            return []
        self._check(stage, "ended")
        if outcome not in ANSWERS:
            self.states[stage] = _OVER
            return self._fail(stage, outcome, reason, now_ns)
        self.states[stage] = _ANSWERED
        self._left -= 1
        if self._left:
            return self._start([number for number, needed in enumerate(self.graph.after) if stage in needed])
        over_ns = now_ns - self.query.deadline_ns
        if over_ns <= 0:
            return self.end(Outcome.ANSWERED, "", now_ns)
        return self.end(Outcome.LATE, f"late by {over_ns / 1e6:.1f} ms", now_ns)

    def end(self, outcome: Outcome, reason: str, now_ns: int) -> list[Step]:
        """End the whole query: the first step reports it, the others withdraw the running stages. Idempotent."""
        if self.is_over:
            return []
        self.is_over = True
        steps: list[Step] = [ApplicationEnded(self.query.id, outcome, reason, now_ns)]
        for stage, state in enumerate(self.states):
            if state is _RUNNING and stage in self._numbers:
                steps.append(QueryWithdrawn(self._numbers[stage], f"withdrawn: {reason}"))
            if state is not _ANSWERED:
                self.states[stage] = _OVER
        return steps

    def _start(self, candidates: Sequence[int]) -> list[Step]:
        states, after, ready = self.states, self.graph.after, []
        for number in candidates:
            if states[number] is _WAITING and all(states[other] is _ANSWERED for other in after[number]):
                states[number] = _RUNNING
                ready.append(number)
        return [StartStages(self.query.id, tuple(ready))] if ready else []

    def _fail(self, stage: int, outcome: Outcome, reason: str, now_ns: int) -> list[Step]:
        """End the whole because a stage got no answer. A later stage that is rejected counts as dropped."""
        whole = outcome
        if outcome is Outcome.REJECTED and self.graph.after[stage]:
            whole = Outcome.DROPPED
        was = "" if whole is outcome else f" was {outcome.value}"
        return self.end(whole, f"stage {self.graph.names[stage]!r}{was}: {reason}", now_ns)

    def _check(self, stage: int, what: str) -> None:
        if self.states[stage] is not _RUNNING:
            name = self.graph.names[stage]
            raise ProtocolViolationError(f"stage {name!r} {what} while it is {self.states[stage].name}")


class FlowProbes:
    """Probes of applications: whole queries, by the rule of `Probes`.

    A stage may be refused for the predicted latency of a later stage, which probes of the stage alone cannot correct.
    The run of a probe counts from its arrival to its end.
    """

    __slots__ = ("_probes", "_refused")

    def __init__(self) -> None:
        self._probes = Probes()
        self._refused: set[str] = set()
        """Applications with a stage that was refused since the last probe."""

    def admit(self, flow: Flow, alone_ns: AloneNs, now_ns: int) -> None:
        """Make a query that arrives a probe, if it is too slow by prediction and its application may have one now."""
        query = flow.query
        if query.tenant not in self._refused:
            return
        predicted_ns, fits_ns = flow.fit(alone_ns)
        if predicted_ns > fits_ns:
            probe = self._probes.admit(query, predicted_ns, fits_ns, query.merge_key, now_ns)
            if probe is not None:
                self._refused.discard(query.tenant)
                flow.run_as(probe, predicted_ns)

    def refused(self, flow: Flow) -> None:
        """Note that a stage was refused."""
        self._refused.add(flow.query.tenant)

    def forget(self, application: str) -> None:
        """Remove the state of an application that was removed or replaced."""
        self._probes.forget(application)
        self._refused.discard(application)

    def ended(self, flow: Flow, outcome: Outcome, now_ns: int) -> None:
        """Update the schedule if the query that ended is a probe."""
        took_ns = now_ns - flow.query.arrival_ns
        self._probes.took(flow.query.id, took_ns, now_ns, has_failed=outcome is not Outcome.ANSWERED)
