"""The executor that runs launches on CPU cores, on threads of this process: with onnxruntime, or torch for `.pt2`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from cotenant.core.actions import Launch
from cotenant.execute.batches import Batches, BatchTensors, ModelGoneError, for_client, for_engine, joined, reason_of
from cotenant.execute.protocol import Loaded, OnEnd, Sessions, Shapes, Timing, WorkerStatus
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.threads.lanes import Lane
from cotenant.execute.warm import warm_up
from cotenant.work import Share


class ThreadExecutor:
    """Runs launches on pinned lanes. Tensors of a batch stay here between its segments.

    A launch that raises fails alone, with the reason; the lane goes on.
    """

    def __init__(self, lane_nice: int = 0) -> None:
        self._lane_nice = lane_nice
        self._models: dict[str, Runner] = {}
        self._lanes: dict[Share, Lane] = {}
        self._batches: Batches[Mapping[str, Any]] = Batches()
        self._lock = threading.Lock()
        self.put = self._batches.put
        self.take = self._batches.take
        self.discard = self._batches.discard

    @property
    def kept(self) -> int:
        """How many queries and batches tensors are kept of."""
        return len(self._batches)

    def load(self, tenant: str, model: Runner, sessions: Sessions, memory_bytes: int | None = None) -> Loaded:
        """Load the sessions that launches of the tenant will need. Raises ModelError. Memory is not limited here."""
        for threads, ranges in sessions:
            model.prepare(ranges, threads)
        return model

    def prepare(self, model: Loaded, sessions: Sessions, shapes: Shapes) -> None:
        """Load further sessions of a loaded model and run each once. Raises ModelError."""
        runner = cast(Runner, model)
        for threads, ranges in sessions:
            runner.prepare(ranges, threads)
            warm_up(runner, ranges, threads, shapes)

    def keep(self, model: Loaded, sessions: Sessions) -> None:
        """Let go of a model's other sessions."""
        cast(Runner, model).keep([threads for threads, _ in sessions])

    def add_model(self, tenant: str, model: Loaded, *, urgent: bool = False) -> None:
        """Launches of this tenant run this model from now on. Cores know no urgency: the policy's order is all."""
        with self._lock:
            self._models[tenant] = cast(Runner, model)  # what `load` gave

    def announce(self, tenant: str) -> None:
        """The core knows the tenant now. Threads do not die: there is nothing to say."""

    def remove_model(self, tenant: str) -> None:
        """Forget the model of a tenant; launches under way end normally."""
        with self._lock:
            self._models.pop(tenant, None)

    def problem(self, tenant: str) -> str:
        """Why the tenant cannot be served at the moment: never, here."""
        return ""

    def workers(self) -> list[WorkerStatus]:
        """There are no processes of tenants."""
        return []

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """See Executor."""
        with self._lock:
            lane = self._lanes.get(launch.share)
            if lane is None:
                lane = self._lanes[launch.share] = Lane(launch.share, self._lane_nice)
            model = self._models.get(launch.work.tenant)
        lane.put(partial(self._run, launch, model, self._batches.try_begin(launch), on_end))

    def release(self, batch: int) -> None:
        """See Executor."""
        self._batches.release(batch)

    def close(self) -> None:
        """See Executor."""
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.close()

    def _run(
        self, launch: Launch, model: Runner | None, batch: BatchTensors[Mapping[str, Any]] | Exception, on_end: OnEnd
    ) -> None:
        began = gathered = ran = time.perf_counter_ns()
        error: str | None = None
        try:
            if isinstance(batch, Exception):
                raise batch
            if model is None:
                raise ModelGoneError(launch.work.tenant)
            if launch.work.start == 0:
                tensors: Mapping[str, Any] = {name: for_engine(joined(each)) for name, each in batch.gather().items()}
            else:
                tensors = batch.kept or {}
            gathered = ran = time.perf_counter_ns()
            cores = launch.share.cores
            tensors = model.run(launch.work.start, launch.work.end, tensors, cores if len(cores) > 1 else 1)
            ran = time.perf_counter_ns()
            if launch.last:
                self._batches.finish(batch, for_client(to_numpy(tensors)))
            else:
                self._batches.pause(launch, batch, tensors)
        except Exception as caught:
            ran = max(gathered, time.perf_counter_ns())
            error = reason_of(caught)
        on_end(launch.id, error, Timing(gathered - began, ran - gathered, time.perf_counter_ns() - ran))
