"""Queue of the loads and unloads that clients request: one at a time, on a separate thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from cotenant.serve.frontend.call_threads import LoopThreads
from cotenant.wire.api import Control, ServeError, Status

MOST_IN_LINE = 16
"""Maximum number of waiting loads and unloads. Further ones are refused, so that clients retry later."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    kind: str
    model: str
    call: Callable[[str], None]
    future: Future[None] = field(default_factory=Future)


class LoadLine:
    """FIFO queue of loads and unloads of a backend.

    A load joins a waiting load of the same model, unless an unload of the model is between them. A running load is not
    joined: it may have read files that have changed since.
    """

    def __init__(self, backend: Control, name: str) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._line: deque[_Waiting] = deque()
        self._is_over = False
        self._thread = LoopThreads(1, name)

    def load(self, model: str) -> Future[None]:
        """Queue a load; the future carries the errors of `Control.load`. Raises ServeError (UNAVAILABLE)."""
        return self._put("load", model, self._backend.load)

    def unload(self, model: str) -> Future[None]:
        """Queue an unload; the future carries the errors of `Control.unload`. Raises ServeError (UNAVAILABLE)."""
        return self._put("unload", model, self._backend.unload)

    def close(self) -> None:
        """Refuse waiting and further requests. Does not wait for the running one."""
        with self._lock:
            self._is_over = True
            line, self._line = list(self._line), deque()
        self._thread.shutdown()
        for each in line:
            each.future.set_exception(_stopping(each.model))

    def _put(self, kind: str, model: str, call: Callable[[str], None]) -> Future[None]:
        with self._lock:
            if self._is_over:
                raise _stopping(model)
            last = next((each for each in reversed(self._line) if each.model == model), None)
            if last is not None and last.kind == kind:
                return last.future
            if len(self._line) >= MOST_IN_LINE:
                text = f"model {model!r}: {MOST_IN_LINE} loads and unloads wait already, the limit; try again later"
                raise ServeError(Status.UNAVAILABLE, text)
            made = _Waiting(kind, model, call)
            self._line.append(made)
            self._thread.submit(self._run_first)
        return made.future

    def _run_first(self) -> None:
        with self._lock:
            if not self._line:
                return
            first = self._line.popleft()
        try:
            first.call(first.model)
        except BaseException as error:
            first.future.set_exception(error)
        else:
            first.future.set_result(None)


def _stopping(model: str) -> ServeError:
    return ServeError(Status.UNAVAILABLE, f"model {model!r}: the server is stopping and loads no more models")
