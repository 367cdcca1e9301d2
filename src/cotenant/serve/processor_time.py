"""Processor time of a server's processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from cotenant import linux
from cotenant.measure.busy import OthersClock
from cotenant.profiles.server_cost import ENGINE, FRONT_END, WORKER

LOADER = "loader"
_KINDS = {
    "cotenant.serve.engine_process": ENGINE,
    "cotenant.serve.frontend_process": FRONT_END,
    "cotenant.execute.worker.main": WORKER,
    "cotenant.measure.loader_process": LOADER,
}


class ProcessorTime:
    """Processor time of a server, by kind of process. `root` is the process that started all others.

    With `server.frontends` 0 the root is the engine and does the work of front-ends. The time of a process that ended
    is kept as far as it was read before. Thread-safe.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self.others = OthersClock(lambda: self.root, linux.available_cores())
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int], float] = {}

    def seconds(self) -> Mapping[str, float]:
        """Seconds since the start by ENGINE, FRONT_END, WORKER and LOADER; they never decrease."""
        with self._lock:
            kinds = [(pid, _KINDS[module]) for pid, module in linux.processes_below(self.root) if module in _KINDS]
            for pid, kind in [(self.root, ENGINE), *kinds]:
                self._last[kind, pid] = max(self._last.get((kind, pid), 0.0), linux.cpu_s(pid))
            found = dict.fromkeys((ENGINE, FRONT_END, WORKER, LOADER), 0.0)
            for (kind, _), used_s in self._last.items():
                found[kind] += used_s
            return found
