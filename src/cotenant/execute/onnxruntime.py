"""The executor that runs launches with onnxruntime on CPU cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cotenant.core.actions import Launch
from cotenant.execute.errors import ModelError
from cotenant.execute.lanes import Lane
from cotenant.execute.protocol import OnEnd, Tensors, Timing
from cotenant.execute.segments import SegmentedModel, to_numpy
from cotenant.types import Partition

_REASON_CHARS = 300


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
        self._models: dict[str, SegmentedModel] = {}
        self._lanes: dict[Partition, Lane] = {}
        self._inputs: dict[int, Tensors] = {}
        self._outputs: dict[int, Tensors] = {}
        self._batches: dict[int, _BatchTensors] = {}
        self._lock = threading.Lock()

    def add_model(self, tenant: str, model: SegmentedModel) -> None:
        """Launches of this tenant run this model from now on."""
        with self._lock:
            self._models[tenant] = model

    def remove_model(self, tenant: str) -> None:
        """Forget the model of a tenant; launches under way end normally."""
        with self._lock:
            self._models.pop(tenant, None)

    def put(self, query: int, inputs: Tensors) -> None:
        """See Executor."""
        self._inputs[query] = inputs

    def take(self, query: int) -> Tensors:
        """See Executor."""
        with self._lock:
            self._inputs.pop(query, None)
            return self._outputs.pop(query)

    def discard(self, query: int) -> None:
        """See Executor."""
        with self._lock:
            self._inputs.pop(query, None)
            self._outputs.pop(query, None)

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """See Executor."""
        with self._lock:
            lane = self._lanes.get(launch.partition)
            if lane is None:
                lane = self._lanes[launch.partition] = Lane(launch.partition, self._lane_nice)
            model = self._models.get(launch.tenant)
        if launch.start == 0:
            inputs = [self._inputs[query] for query in launch.queries]
            lane.put(partial(self._run_first, launch, model, inputs, on_end))
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

    def _run_first(self, launch: Launch, model: SegmentedModel | None, inputs: list[Tensors], on_end: OnEnd) -> None:
        began = time.perf_counter_ns()
        try:
            batch = _gather(launch, inputs)
        except Exception as error:
            on_end(launch.id, _reason(error), Timing(input_ns=time.perf_counter_ns() - began))
            return
        self._run(launch, model, batch, time.perf_counter_ns() - began, on_end)

    def _run(
        self, launch: Launch, model: SegmentedModel | None, batch: _BatchTensors | None, input_ns: int, on_end: OnEnd
    ) -> None:
        began = time.perf_counter_ns()
        ran = began
        error: str | None = None
        try:
            if model is None or batch is None:
                raise ModelGoneError(f"model of {launch.tenant!r} is not loaded any more")
            cores = launch.partition.cores
            tensors = model.run(launch.start, launch.end, batch.tensors, cores if len(cores) > 1 else 1)
            ran = time.perf_counter_ns()
            if launch.last:
                self._keep(_scatter(batch, tensors))
                self._batches.pop(launch.batch, None)
            else:
                self._batches[launch.batch] = _BatchTensors(tensors, batch.rows, batch.queries)
        except Exception as caught:
            ran = time.perf_counter_ns()
            self._batches.pop(launch.batch, None)
            error = _reason(caught)
        on_end(launch.id, error, Timing(input_ns, ran - began, time.perf_counter_ns() - ran))

    def _keep(self, outputs: Mapping[int, Tensors]) -> None:
        """Keep outputs until they are taken; those of queries that have ended meanwhile nobody would take."""
        with self._lock:
            self._outputs.update({query: tensors for query, tensors in outputs.items() if query in self._inputs})


class ModelGoneError(RuntimeError):
    """A launch names a model that was unloaded meanwhile."""


def _gather(launch: Launch, inputs: list[Tensors]) -> _BatchTensors:
    """Put the inputs of the queries of a batch below each other."""
    if len(inputs) == 1:
        return _BatchTensors({name: _for_engine(array) for name, array in inputs[0].items()}, (), launch.queries)
    rows = tuple(len(next(iter(tensors.values()))) for tensors in inputs)
    merged = {name: _for_engine(np.concatenate([tensors[name] for tensors in inputs])) for name in inputs[0]}
    return _BatchTensors(merged, rows, launch.queries)


def _scatter(batch: _BatchTensors, tensors: Mapping[str, Any]) -> dict[int, Tensors]:
    """Give each query its rows of the outputs. Raises ValueError when an output has no row per input row."""
    outputs = {name: _for_client(array) for name, array in to_numpy(tensors).items()}
    if len(batch.queries) == 1:
        return {batch.queries[0]: outputs}
    total = sum(batch.rows)
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != total:
            raise ValueError(f"output {name!r} has shape {array.shape}, expected {total} rows: set max_batch = 1")
    scattered: dict[int, Tensors] = {}
    at = 0
    for query, rows in zip(batch.queries, batch.rows, strict=True):
        scattered[query] = {name: array[at : at + rows] for name, array in outputs.items()}
        at += rows
    return scattered


def _for_engine(array: Any) -> Any:
    """BYTES tensors hold bytes on the wire and text in onnxruntime."""
    if array.dtype != np.object_:
        return array
    return np.array([_text(item) for item in array.ravel()], dtype=np.object_).reshape(array.shape)


def _text(item: bytes | str) -> str:
    try:
        return item if isinstance(item, str) else item.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("an element of a BYTES input is not UTF-8 text, which this model takes") from None


def _for_client(array: Any) -> Any:
    if array.dtype.kind not in "OU":
        return array
    return np.array([str(item).encode() for item in array.ravel()], dtype=np.object_).reshape(array.shape)


def _reason(error: Exception) -> str:
    """A sentence for the client, without the paths of this machine."""
    text = error.reason if isinstance(error, ModelError) else str(error) or type(error).__name__
    return " ".join(text.split())[:_REASON_CHARS]
