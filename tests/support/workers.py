"""Worker processes under a ProcessExecutor: its reports, and the ends of its launches."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

import onnx

from cotenant.core.actions import Launch
from cotenant.core.events import Event, TenantResumed
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.protocol import LoadSpec, Tensors, Timing
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.execute.worker.limits import WorkerLimits
from cotenant.work import Share, Work

WAIT_S = 60.0
CORE = Share((sorted(os.sched_getaffinity(0))[-1],))
OTHER = Share((sorted(os.sched_getaffinity(0))[0],))
PROMPT = WorkerLimits(backoff_s=0.01)


def pid_of(executor: ProcessExecutor, tenant: str) -> int:
    pid = next(worker.pid for worker in executor.workers() if worker.tenant == tenant)
    assert pid > 0, "the worker is being replaced"  # to kill 0 would be to kill this process
    return pid


class _Heard(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


class Host:
    """A ProcessExecutor, its reports, and the ends of its launches."""

    def __init__(self, folder: Path, limits: WorkerLimits = PROMPT) -> None:
        self.executor = ProcessExecutor(0, limits)
        self.executor.on_event = self._event
        self.events: list[Event] = []
        self.ends: dict[int, str | None] = {}
        self.units: dict[str, int] = {}
        self._folder = folder
        self._changed = threading.Condition()
        self._order: list[object] = []
        self.logs: list[str] = []
        self._heard_by = _Heard(self._heard)
        logging.getLogger("cotenant.workers").addHandler(self._heard_by)

    def close(self) -> None:
        logging.getLogger("cotenant.workers").removeHandler(self._heard_by)
        self.executor.close()

    def load(self, tenant: str, make: Callable[[], onnx.ModelProto], memory_bytes: int | None = None) -> None:
        path = self._folder / f"{tenant}.onnx"
        onnx.save(make(), path)
        model = SegmentedModel.open(path, cache_dir=self._folder / "graphs")
        units = self.units[tenant] = model.unit_count
        self.executor.add_model(
            tenant, self.executor.load(tenant, model, LoadSpec((Share((0,)),), (0, units), memory_bytes=memory_bytes))
        )
        self.executor.announce(tenant)

    def pid(self, tenant: str) -> int:
        return pid_of(self.executor, tenant)

    def start(self, tenant: str, query: int, inputs: Tensors, partition: Share = CORE, units: int = 2) -> int:
        self.executor.put(query, inputs)
        self.executor.start(Launch(query, query, (query,), Work(tenant, 0, 1, 0, units), True, partition, 1), self._end)
        return query

    def wait(self, *launches: int) -> list[str | None]:
        self.wait_for(lambda: set(launches) <= set(self.ends))
        return [self.ends[launch] for launch in launches]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (self.events, self.ends)

    def wait_resumed(self, times: int = 1) -> None:
        self.wait_for(lambda: sum(isinstance(event, TenantResumed) for event in self.events) == times)

    def _heard(self, line: str) -> None:
        with self._changed:
            self.logs.append(line)
            self._changed.notify_all()

    def _event(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._order.append(event)
            self._changed.notify_all()

    def _end(self, launch: int, error: str | None, timing: Timing) -> None:
        with self._changed:
            assert launch not in self.ends, "a launch ended twice"
            self.ends[launch] = error
            self._order.append(launch)
            self._changed.notify_all()


Hosts = Callable[..., Host]


def gone(pid: int) -> None:
    """Wait for the end of a process that may not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], WAIT_S)[0], "the process lives on"
    finally:
        os.close(descriptor)
