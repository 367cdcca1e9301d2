"""What follows from the time when an answer is written: how its query is counted, and what predictors learn of it."""

from __future__ import annotations

import threading

from cotenant.core.events import AnswerLate
from cotenant.predict.online import OnlineModel
from cotenant.serve.engine.clock import Clock
from cotenant.serve.engine.counters import Counters
from cotenant.wire.api import InferResult


class Replies:
    """Takes what front-ends say of answers. Thread-safe."""

    def __init__(self, clock: Clock, counters: Counters, beliefs: OnlineModel) -> None:
        self._clock = clock
        self._counters = counters
        self._beliefs = beliefs
        self._learning = threading.Lock()

    def written(self, result: InferResult, *, learns: bool) -> AnswerLate | None:
        """An answer is written now. Gives what is to be told where it was there in time, and is written too late."""
        now = self._clock.now_ns()
        late = self._counters.replied(result.query, now)
        if result.ended_ns and learns:
            with self._learning:
                self._beliefs.replied(now - result.ended_ns)
        return None if late is None else AnswerLate(result.query, late.tenant, late.arrival_ns, now)
