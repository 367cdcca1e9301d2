"""The executor that runs launches on CPU cores, on threads of this process: with onnxruntime, or torch for `.pt2`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from cotenant.config import DeviceSection
from cotenant.core.actions import Launch
from cotenant.execute.base import BaseExecutor
from cotenant.execute.batches import BatchTensors, ModelGoneError, for_client, for_engine, joined, reason_of
from cotenant.execute.protocol import Loaded, ModelExecutor, OnEnd, OnGrew, Sessions, Shapes, Timing
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.threads.lanes import Lane
from cotenant.execute.warm import warm_up
from cotenant.work import Share


class ThreadExecutor(BaseExecutor[Mapping[str, Any]]):
    """Runs launches on pinned lanes. Tensors of a batch stay here between its segments.

    A launch that raises fails alone, with the reason; the lane goes on. Batches may run in parts, and launches grow.
    """

    has_parts = True

    def __init__(self, lane_nice: int = 0) -> None:
        super().__init__()
        self._lane_nice = lane_nice
        self._models: dict[str, Runner] = {}
        self._lanes: dict[Share, Lane] = {}
        self._grown: dict[int, tuple[Share, OnGrew]] = {}
        """What launches under way are to take in at their next stop."""

    def load(self, tenant: str, model: Runner, sessions: Sessions, memory_bytes: int | None = None) -> Loaded:
        """See ModelExecutor. Memory is not limited here."""
        for threads, ranges in sessions:
            model.prepare(ranges, threads)
        return model

    def prepare(self, model: Loaded, sessions: Sessions, shapes: Shapes) -> None:
        """See ModelExecutor."""
        runner = cast(Runner, model)
        for threads, ranges in sessions:
            runner.prepare(ranges, threads)
            warm_up(runner, ranges, threads, shapes)

    def keep(self, model: Loaded, sessions: Sessions) -> None:
        """See ModelExecutor."""
        cast(Runner, model).keep([threads for threads, _ in sessions])

    def add_model(self, tenant: str, model: Loaded, *, urgent: bool = False) -> None:
        """See ModelExecutor. Cores know no urgency: the policy's order is all."""
        with self._lock:
            self._models[tenant] = cast(Runner, model)  # what `load` gave

    def remove_model(self, tenant: str) -> None:
        """See ModelExecutor."""
        with self._lock:
            self._models.pop(tenant, None)

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """See Executor."""
        with self._lock:
            lane = self._lanes.get(launch.share)
            if lane is None:
                lane = self._lanes[launch.share] = Lane(launch.share, self._lane_nice)
            model = self._models.get(launch.work.tenant)
        lane.put(partial(self._run, launch, model, self._batches.try_begin(launch), on_end))

    def grow(self, launch: int, share: Share, on_grew: OnGrew) -> None:
        """See Executor."""
        self._grown[launch] = share, on_grew

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
            tensors: Mapping[str, Any] = batch.kept or {}
            if launch.work.start == 0 and not launch.part:
                tensors = {name: for_engine(joined(each)) for name, each in batch.gather().items()}
            gathered = ran = time.perf_counter_ns()
            share, start = launch.share, launch.work.start
            for end in (*launch.stops, launch.work.end):
                tensors = model.run(start, end, tensors, share.cores if share.size > 1 else 1)
                if end != launch.work.end and (more := self._grown.pop(launch.id, None)) is not None:
                    share, on_grew = more
                    on_grew(launch.id)
                start = end
            ran = time.perf_counter_ns()
            if launch.last:
                self._batches.finish(launch, batch, for_client(to_numpy(tensors)))
            else:
                self._batches.pause(launch, batch, tensors)
        except Exception as caught:
            ran = max(gathered, time.perf_counter_ns())
            error = reason_of(caught)
        if launch.stops:
            self._grown.pop(launch.id, None)
        on_end(launch.id, error, Timing(gathered - began, ran - gathered, time.perf_counter_ns() - ran))


def open_threads(section: DeviceSection, partitions: Sequence[Share], lane_nice: int) -> ModelExecutor:
    """Threads of this process, on whatever cores launches name."""
    return ThreadExecutor(lane_nice)
