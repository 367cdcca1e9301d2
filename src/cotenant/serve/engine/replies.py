"""Processing of written answers: final outcome of the query, and the reply latency for predictors."""

from __future__ import annotations

import threading

from cotenant.core.events import AnswerLate
from cotenant.predict.online import OnlineModel
from cotenant.serve.engine.counters import Counters


class Replies:
    """Receiver of the front-ends' reports on written answers. Thread-safe."""

    def __init__(self, counters: Counters, beliefs: OnlineModel) -> None:
        self._counters = counters
        self._beliefs = beliefs
        self._learning = threading.Lock()

    def written(self, query: int, ended_ns: int, at_ns: int, *, learns: bool) -> AnswerLate | None:
        """Record that an answer was written at `at_ns`. Returns an AnswerLate event if the query ended in time and its
        answer was written after the deadline."""
        late = self._counters.replied(query, at_ns)
        if ended_ns and learns:
            with self._learning:
                self._beliefs.replied(at_ns - ended_ns)
        return None if late is None else AnswerLate(query, late.tenant, late.arrival_ns, at_ns)
