"""The executor that runs launches on CPU cores, on threads of this process: with onnxruntime, or torch for `.pt2`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from cotenant.core.actions import Launch
from cotenant.execute.batches import (
    ModelGoneError,
    QueryTensors,
    for_client,
    for_engine,
    joined,
    pieces_of,
    reason_of,
    scatter,
)
from cotenant.execute.lanes import Lane
from cotenant.execute.protocol import Loaded, OnEnd, Sessions, Shapes, Tensors, Timing, WorkerStatus
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.warm import warm_up
from cotenant.types import Partition


@dataclass(frozen=True, slots=True)
class _BatchTensors:
    """What a paused batch keeps: the tensors live at its boundary, and the rows of each of its queries."""

    tensors: Mapping[str, Any]
    rows: tuple[int, ...]
    queries: tuple[int, ...]


class OnnxRuntimeExecutor:
    """Runs launches on pinned lanes. Tensors of a batch stay here between its segments.

    A launch that raises fails alone, with the reason; the lane goes on.
    """

    def __init__(self, lane_nice: int = 0) -> None:
        self._lane_nice = lane_nice
        self._models: dict[str, Runner] = {}
        self._lanes: dict[Partition, Lane] = {}
        self._queries = QueryTensors()
        self._batches: dict[int, _BatchTensors] = {}
        self._lock = threading.Lock()
        self.put = self._queries.put
        self.take = self._queries.take
        self.discard = self._queries.discard

    @property
    def kept(self) -> int:
        """How many queries and batches tensors are kept of."""
        return len(self._queries) + len(self._batches)

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
            lane = self._lanes.get(launch.partition)
            if lane is None:
                lane = self._lanes[launch.partition] = Lane(launch.partition, self._lane_nice)
            model = self._models.get(launch.tenant)
        if launch.start == 0:
            lane.put(partial(self._run_first, launch, model, self._queries.inputs(launch.queries), on_end))
        else:
            lane.put(partial(self._run, launch, model, self._batches.get(launch.batch), 0, on_end))

    def release(self, batch: int) -> None:
        """See Executor."""
        self._batches.pop(batch, None)

    def close(self) -> None:
        """See Executor."""
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.close()

    def _run_first(self, launch: Launch, model: Runner | None, inputs: list[Tensors], on_end: OnEnd) -> None:
        began = time.perf_counter_ns()
        try:
            pieces, rows = pieces_of(inputs)
            merged = {name: for_engine(joined(arrays)) for name, arrays in pieces.items()}
        except Exception as error:
            on_end(launch.id, reason_of(error), Timing(input_ns=time.perf_counter_ns() - began))
            return
        batch = _BatchTensors(merged, rows, launch.queries)
        self._run(launch, model, batch, time.perf_counter_ns() - began, on_end)

    def _run(
        self, launch: Launch, model: Runner | None, batch: _BatchTensors | None, input_ns: int, on_end: OnEnd
    ) -> None:
        began = time.perf_counter_ns()
        ran = began
        error: str | None = None
        try:
            if model is None or batch is None:
                raise ModelGoneError(launch.tenant)
            cores = launch.partition.cores
            tensors = model.run(launch.start, launch.end, batch.tensors, cores if len(cores) > 1 else 1)
            ran = time.perf_counter_ns()
            if launch.last:
                self._queries.keep(scatter(batch.queries, batch.rows, for_client(to_numpy(tensors))))
                self._batches.pop(launch.batch, None)
            else:
                self._batches[launch.batch] = _BatchTensors(tensors, batch.rows, batch.queries)
        except Exception as caught:
            ran = time.perf_counter_ns()
            self._batches.pop(launch.batch, None)
            error = reason_of(caught)
        on_end(launch.id, error, Timing(input_ns, ran - began, time.perf_counter_ns() - ran))
