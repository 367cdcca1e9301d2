"""What follows from the time when an answer is written: how its query is counted, and what predictors learn of it."""

from __future__ import annotations

import threading

from cotenant.core.events import AnswerLate
from cotenant.predict.online import OnlineModel
from cotenant.serve.engine.counters import Counters


class Replies:
    """Takes what front-ends say of answers. Thread-safe."""

    def __init__(self, counters: Counters, beliefs: OnlineModel) -> None:
        self._counters = counters
        self._beliefs = beliefs
        self._learning = threading.Lock()

    def written(self, query: int, ended_ns: int, at_ns: int, *, learns: bool) -> AnswerLate | None:
        """An answer was written. Gives what is to be told where it was there in time, and was written too late."""
        late = self._counters.replied(query, at_ns)
        if ended_ns and learns:
            with self._learning:
                self._beliefs.replied(at_ns - ended_ns)
        return None if late is None else AnswerLate(query, late.tenant, late.arrival_ns, at_ns)
