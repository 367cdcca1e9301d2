"""The executor that runs every tenant's model in a worker process of its own.

A model that crashes, hangs or exhausts memory ends with its process. Launches under way of the tenant fail with the
reason, and its queue waits for the next worker; other tenants are not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from typing_extensions import override

from cotenant import __version__
from cotenant.config import DeviceSection
from cotenant.core.actions import Launch
from cotenant.core.events import Event
from cotenant.execute.base import BaseExecutor
from cotenant.execute.batches import ModelGoneError
from cotenant.execute.protocol import (
    Loaded,
    LoadSpec,
    ModelExecutor,
    ModelSource,
    OnEnd,
    OnExpanded,
    Sessions,
    WorkerStatus,
)
from cotenant.execute.runner import Runner
from cotenant.execute.sessions import Wanted
from cotenant.execute.source import source_of
from cotenant.execute.worker.channel import Open
from cotenant.execute.worker.limits import WorkerLimits
from cotenant.execute.worker.supervisor import WorkerSupervisor
from cotenant.work import Share


class ProcessExecutor(BaseExecutor):
    """Runs launches in worker processes. Intermediate tensors stay there; inputs and outputs pass in shared memory.

    The home of a batch is the supervisor of the worker that has its tensors. `on_event` and `on_end` are called from
    threads of this executor, without locks that other methods need. A batch may run as several tasks, and launches may
    be expanded.
    """

    has_tasks = True
    has_parallel_loads = True

    def __init__(self, lane_nice: int = 0, limits: WorkerLimits = WorkerLimits()) -> None:
        super().__init__()
        self._lane_nice = lane_nice
        self._limits = limits
        self._supervisors: dict[str, WorkerSupervisor] = {}
        self._loading: list[WorkerSupervisor] = []
        self._all: list[WorkerSupervisor] = []
        """Supervisors that have not ended, including those of removed models."""
        self._is_stopping = False
        self._lost_before: dict[str, Counter[str]] = {}
        """By tenant: workers lost by its earlier models."""

    def load(self, tenant: str, model: Runner | ModelSource, spec: LoadSpec) -> Loaded:
        """Start a worker for the tenant and wait until it has loaded the model with its sessions.

        An open model is closed. Raises ModelError when the worker cannot load it.
        """
        source = model if isinstance(model, ModelSource) else source_of(model)
        place = str(source.path), str(source.folder.parent), source.folder.name
        sessions = _plain(spec.sessions)
        limit = self.max_answer_bytes
        message = Open(
            tenant, *place, sessions, self._lane_nice, source.arithmetic, dict(source.follows), limit, __version__
        )
        if not isinstance(model, ModelSource):
            model.close()
        limits = replace(self._limits, memory_bytes=spec.memory_bytes)
        supervisor = WorkerSupervisor(message, limits, self._batches, self._tell, self.readers, self.starter)
        with self._lock:
            self._all = [each for each in self._all if each.is_alive]
            self._loading.append(supervisor)
            if self._is_stopping:
                supervisor.close()
        try:
            supervisor.load()
        finally:
            with self._lock:
                self._loading.remove(supervisor)
                self._all.append(supervisor)
                if self._is_stopping:
                    supervisor.close()
        return supervisor

    @override
    @contextmanager
    def expecting(self, tenant: str, suffix: str) -> Iterator[None]:
        """The worker starts, where a starter keeps it, while the model is opened elsewhere."""
        if self.starter is None:
            yield
            return
        with suppress(OSError):  # the load tries again, and reports it
            self.starter.expect(tenant, self._lane_nice, suffix)
        try:
            yield
        finally:
            self.starter.forget(tenant)

    def prepare(self, model: Loaded, spec: LoadSpec) -> None:
        """Let the worker load the sessions of `spec`."""
        assert isinstance(model, WorkerSupervisor)
        model.prepare(_plain(spec.sessions), {name: tuple(dims) for name, dims in spec.shapes[0].items()})

    def keep(self, model: Loaded, spec: LoadSpec) -> None:
        """Let the worker unload other sessions than those of `spec`."""
        assert isinstance(model, WorkerSupervisor)
        model.keep(_plain(spec.sessions))

    def add_model(self, tenant: str, model: Loaded) -> None:
        """Let launches of the tenant run this model. `urgent` has no effect on cores: the policy decides the order."""
        assert isinstance(model, WorkerSupervisor)
        with self._lock:
            self._supervisors[tenant] = model

    @override
    def announce(self, tenant: str) -> None:
        with self._lock:
            supervisor = self._supervisors[tenant]
        supervisor.announce()

    def remove_model(self, tenant: str) -> None:
        """Forget the model of a tenant, and keep its number of lost workers."""
        with self._lock:
            gone = self._supervisors.pop(tenant, None)
            if gone is not None:
                self._lost_before[tenant] = self._lost_before.get(tenant, Counter()) + Counter(gone.status.restarts)

    @override
    def cancel_loads(self) -> None:
        with self._lock:
            self._is_stopping = True
            loading = list(self._loading)
        for supervisor in loading:
            supervisor.close()

    def lasting_problem(self, tenant: str) -> str:
        """Why the tenant's next worker would fail as well, or "". Called for every query, so it takes no lock."""
        supervisor = self._supervisors.get(tenant)
        return supervisor.lasting_problem if supervisor else ""

    @override
    def problem(self, tenant: str) -> str:
        with self._lock:
            supervisor = self._supervisors.get(tenant)
        return supervisor.problem if supervisor else ""

    @override
    def workers(self) -> list[WorkerStatus]:
        with self._lock:
            found = [(each.status, self._lost_before.get(each.tenant)) for each in self._supervisors.values()]
        return [replace(each, restarts=before + Counter(each.restarts)) if before else each for each, before in found]

    def _start(self, launch: Launch, on_end: OnEnd) -> None:
        with self._lock:
            supervisor = self._supervisors.get(launch.work.tenant)
        if supervisor is None:
            raise ModelGoneError(launch.work.tenant)
        problem = supervisor.start(launch, self._batches.begin(launch, supervisor), on_end)
        if problem is not None:
            self._end_later(launch, problem, on_end)

    @override
    def release(self, batch: int) -> None:
        supervisor = self._batches.release(batch)
        if isinstance(supervisor, WorkerSupervisor):
            supervisor.release(batch)

    def expand(self, launch: int, share: Share, on_expanded: OnExpanded) -> bool:
        """Ask the worker of the launch; False, since the worker answers later."""
        for supervisor in list(self._supervisors.values()):
            supervisor.expand(launch, share, on_expanded)
        return False

    def close(self, until_s: float | None = None) -> None:
        """Stop. Workers that have not ended at `until_s` are killed."""
        self.cancel_loads()
        with self._lock:
            supervisors, self._all = [*self._all, *self._loading], []
            self._supervisors.clear()
        for supervisor in supervisors:
            supervisor.close()
        for supervisor in supervisors:
            supervisor.join(until_s)
        super().close(until_s)

    def _tell(self, event: Event) -> None:
        self.on_event(event)


def _plain(sessions: Sessions) -> Wanted:
    """Sessions as sent to a worker."""
    return tuple((threads, tuple(ranges)) for threads, ranges in sessions)


def open_workers(section: DeviceSection, partitions: Sequence[Share], lane_nice: int) -> ModelExecutor:
    """An executor on worker processes, on the cores of this machine."""
    return ProcessExecutor(lane_nice)
