"""One query of an application: which of its stages run when an answer comes, and how the whole ends.

A pure state machine: no clock, no thread, no tensors. Its owner carries the steps out and tells how each stage ended.
Whatever happens, a flow finishes exactly once, no stage starts twice, none starts before all that it needs has been
answered, and every stage that is under way at the end is withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from cotenant.errors import InvalidValueError, ProtocolViolationError
from cotenant.types import ANSWERS, Outcome


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The stages of an application, each after those that it needs: `after[i]` are numbers of stages below i.

    Raises InvalidValueError when there is no stage, or one needs itself, a later one or one that is not there.
    """

    names: tuple[str, ...]
    after: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.after):
            raise InvalidValueError("stage graph", "names", self.names, "one name for each entry of after, at least 1")
        for number, needed in enumerate(self.after):
            if any(not 0 <= other < number for other in needed):
                raise InvalidValueError("stage graph", "after", needed, f"numbers of stages before stage {number}")

    def needed(self, wanted: Iterable[int]) -> tuple[bool, ...]:
        """Per stage, whether it is one of those wanted or comes before one of them."""
        found = [False] * len(self.names)
        for number in wanted:
            found[number] = True
        for number in range(len(found) - 1, -1, -1):
            if found[number]:
                for other in self.after[number]:
                    found[other] = True
        return tuple(found)

    def rest_ns(self, times_ns: Sequence[int]) -> tuple[int, ...]:
        """Per stage, the time of the longest path of stages after it. `times_ns` is that of each stage."""
        rest = [0] * len(self.names)
        for number in range(len(rest) - 1, -1, -1):
            for other in self.after[number]:
                rest[other] = max(rest[other], rest[number] + times_ns[number])
        return tuple(rest)

    def is_too_long(self, stage: int, times_ns: Sequence[int], limit_ns: int, ends_ns: Sequence[int] | None) -> bool:
        """Whether stages that take so long, each alone, do not fit into what the application is allowed; with the ends
        of a plan's shares, this stage into its share. Then it is refused for what is believed of latencies."""
        if max(self.ends_ns(times_ns)) > limit_ns:
            return True
        return ends_ns is not None and times_ns[stage] > ends_ns[stage] - max(
            [ends_ns[other] for other in self.after[stage]], default=0
        )

    def ends_ns(self, shares_ns: Sequence[int]) -> tuple[int, ...]:
        """Per stage, when its share of the SLO ends, counted from the arrival: that of the longest path to it."""
        ends: list[int] = []
        for number, needed in enumerate(self.after):
            ends.append(max((ends[other] for other in needed), default=0) + shares_ns[number])
        return tuple(ends)

    def planned_ends_ns(self, shares_ns: Mapping[str, int]) -> tuple[int, ...] | None:
        """`ends_ns` of the shares that a plan gives stages, by name; None where these are not just the stages."""
        if sorted(shares_ns) != sorted(self.names):
            return None
        return self.ends_ns([shares_ns[name] for name in self.names])

    def deadlines_ns(
        self,
        arrival_ns: int,
        deadline_ns: int,
        ends_ns: Sequence[int] | None,
        times_ns: Callable[[], Sequence[int]],
    ) -> list[int]:
        """When each stage of a query has to end: where its planned share does, else where the stages after it need.

        `times_ns` gives the predicted latency of each stage; it is asked only where there is no plan.
        """
        if ends_ns is not None:
            return [min(deadline_ns, arrival_ns + end) for end in ends_ns]
        return [deadline_ns - rest for rest in self.rest_ns(times_ns())]


@dataclass(frozen=True, slots=True)
class StartStage:
    """Let a stage's query arrive, and tell how it ended."""

    stage: int


@dataclass(frozen=True, slots=True)
class WithdrawStage:
    """Nobody waits for this stage any more; how it ends does not matter."""

    stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The application's query has ended, with its one outcome; `reason` is empty for an answer in time."""

    outcome: Outcome
    reason: str = ""


Step = StartStage | WithdrawStage | Finish


class StageState(IntEnum):
    """Where a stage is."""

    WAITING = auto()
    RUNNING = auto()
    ANSWERED = auto()
    OVER = auto()
    """It ended without an answer, was withdrawn, or will never start."""


class Flow:
    """The state of one query. Not thread-safe: the owner serialises the calls.

    `needed` says which stages run at all, by default all: with a stage it holds those before it. An answer after
    `deadline_ns` is late; when one stage is late against a deadline of its own, that alone ends nothing.
    """

    __slots__ = ("_deadline_ns", "_graph", "_left", "is_over", "states")

    def __init__(self, graph: StageGraph, deadline_ns: int, needed: Sequence[bool] = ()) -> None:
        self._graph = graph
        self._deadline_ns = deadline_ns
        runs = needed or (True,) * len(graph.names)
        self.states = [StageState.WAITING if each else StageState.OVER for each in runs]
        self._left = sum(runs)
        self.is_over = False

    def begin(self) -> list[Step]:
        """The query has arrived: start the stages that need no other."""
        return self._start(number for number, needed in enumerate(self._graph.after) if not needed)

    def stage_ended(self, stage: int, outcome: Outcome, reason: str, now_ns: int) -> list[Step]:
        """A stage that was started has ended. Raises ProtocolViolationError for one that was not, or ended before.

        After the end of the whole nothing follows any more.
        """
        if self.is_over:
            return []
        if self.states[stage] is not StageState.RUNNING:
            name = self._graph.names[stage]
            raise ProtocolViolationError(f"stage {name!r} ended while it is {self.states[stage].name}")
        if outcome not in ANSWERS:
            self.states[stage] = StageState.OVER
            return self._fail(stage, outcome, reason)
        self.states[stage] = StageState.ANSWERED
        self._left -= 1
        if self._left == 0:
            over_ns = now_ns - self._deadline_ns
            if over_ns <= 0:
                return self.end(Outcome.ANSWERED, "")
            return self.end(Outcome.LATE, f"late by {over_ns / 1e6:.1f} ms")
        return self._start(number for number, needed in enumerate(self._graph.after) if stage in needed)

    def end(self, outcome: Outcome, reason: str) -> list[Step]:
        """End the whole, from outside or because of a stage; what is under way is withdrawn. Repeated, it does nothing.

        The first step is the Finish.
        """
        if self.is_over:
            return []
        self.is_over = True
        steps: list[Step] = [Finish(outcome, reason)]
        for number, state in enumerate(self.states):
            if state is StageState.RUNNING:
                steps.append(WithdrawStage(number, reason))
            if state is not StageState.ANSWERED:
                self.states[number] = StageState.OVER
        return steps

    def _start(self, candidates: Iterable[int]) -> list[Step]:
        steps: list[Step] = []
        for number in candidates:
            ready = all(self.states[other] is StageState.ANSWERED for other in self._graph.after[number])
            if self.states[number] is StageState.WAITING and ready:
                self.states[number] = StageState.RUNNING
                steps.append(StartStage(number))
        return steps

    def _fail(self, stage: int, outcome: Outcome, reason: str) -> list[Step]:
        """A stage got no answer, and the whole will get none. What was let in and then refused was given up later."""
        whole = outcome
        if outcome is Outcome.REJECTED and self._graph.after[stage]:
            whole = Outcome.DROPPED
        was = "" if whole is outcome else f" was {outcome.value}"
        return self.end(whole, f"stage {self._graph.names[stage]!r}{was}: {reason}")
