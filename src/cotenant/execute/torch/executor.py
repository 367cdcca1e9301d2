"""The executor that runs launches with torch on the streams of a device.

A launch is submitted as a whole (inputs up, units, outputs down, an event) and nobody waits for it but the lane's
second thread, which sleeps until the event and then tells the core. See docs/torch.md, "Streams".
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch

from cotenant.core.actions import Launch
from cotenant.errors import CotenantError
from cotenant.execute.base import BaseExecutor
from cotenant.execute.batches import BatchTensors, ModelGoneError, reason_of
from cotenant.execute.errors import ModelError, TensorError
from cotenant.execute.gpu.graph_pool import GraphCounts, GraphKey, GraphPool
from cotenant.execute.gpu.range_graph import RangeGraph
from cotenant.execute.gpu.residents import MIB, DeviceFullError, Resident, Residents, StreamModel
from cotenant.execute.gpu.stream_threads import StreamThreads, Waiting
from cotenant.execute.gpu.streams import Event, Named, StreamDevice, StreamLane, causes
from cotenant.execute.place import Place, StreamPlace
from cotenant.execute.protocol import Loaded, OnEnd, Sessions, Shapes, Timing
from cotenant.execute.runner import Runner
from cotenant.execute.torch.arrays import array_of, tensor_of
from cotenant.work import Share

_log = logging.getLogger("cotenant.torch")


class DeviceLostError(RuntimeError):
    """The device takes no more work."""


@dataclass(slots=True)
class _Flight:
    """A launch between its submission and its end, with all that the device may still read or write for it."""

    launch: Launch
    on_end: OnEnd
    batch: BatchTensors | Exception
    """What is kept of it are its inputs, or the tensors live where it stands."""
    graph: RangeGraph | None = None
    results: Named | None = None
    events: tuple[Event, ...] = ()
    """Before and after the copies of inputs, after the units, after the outputs; of a failed launch the last one."""
    gather_ns: int = 0
    error: str | None = None

    @property
    def tensors(self) -> Named:
        """What its units begin with."""
        return self.batch.kept if isinstance(self.batch, BatchTensors) else {}

    def drop(self) -> None:
        """Let go of all tensors; nobody looks at it any more."""
        del self.batch, self.graph, self.results


class TorchExecutor(BaseExecutor):
    """Runs launches on the streams of a device. Tensors of a batch stay there between its segments.

    At most `graphs` captured ranges are kept, where the device has graphs. A launch that raises fails alone, with the
    reason; the lane goes on. When memory runs out, models without launches give theirs, the least recently used first,
    and the launch is tried again; then it fails alone.
    """

    lanes_change = False

    def __init__(self, device: StreamDevice, *, graphs: int = 64) -> None:
        super().__init__()
        self.device = device
        self._graphs: GraphPool[RangeGraph] = GraphPool(graphs if device.has_graphs else 0)
        self._residents = Residents(device, lambda number: bool(self._graphs.drop(number)))
        self._models: dict[str, Resident] = {}
        self._lanes: dict[Share, tuple[StreamLane, StreamThreads]] = {}
        self._lost = ""

    @property
    def place(self) -> Place:
        """See ModelExecutor."""
        return StreamPlace(self.device)

    @property
    def graph_counts(self) -> GraphCounts:
        """What happened to captured ranges so far."""
        return self._graphs.counts

    def load(self, tenant: str, model: Runner, sessions: Sessions, memory_bytes: int | None = None) -> Loaded:
        """See ModelExecutor: the weights go to the device. Memory is not limited here."""
        if not hasattr(model, "move"):
            raise ModelError(
                model.path, f"{self.device.name} runs torch models alone", "Export it with torch.export to model.pt2"
            )
        resident = self._residents.add(cast(StreamModel, model))
        try:
            self._residents.with_room(resident, partial(self._residents.bring, resident), lambda: "the weights")
            self.prepare(resident, sessions, {})
        except DeviceFullError as error:
            self._residents.leave(resident)
            raise ModelError(model.path, str(error), "Serve fewer models from this device, or a smaller one") from None
        except Exception:
            self._residents.leave(resident)
            raise
        return resident

    def prepare(self, model: Loaded, sessions: Sessions, shapes: Shapes) -> None:
        """See ModelExecutor. Nothing is run: what a stream needs is made at its first launch."""
        cast(Resident, model).model.prepare([each for _, ranges in sessions for each in ranges])

    def keep(self, model: Loaded, sessions: Sessions) -> None:
        """See ModelExecutor: nothing was loaded for some lanes alone."""

    def add_model(self, tenant: str, model: Loaded, *, urgent: bool = False) -> None:
        """See ModelExecutor: urgent launches run on the lanes' urgent streams."""
        resident = model if isinstance(model, Resident) else self._residents.add(cast(StreamModel, model))
        resident.urgent = urgent
        with self._lock:
            self._models[tenant] = resident

    def remove_model(self, tenant: str) -> None:
        """See ModelExecutor."""
        with self._lock:
            resident = self._models.pop(tenant, None)
        if resident is not None:
            self._graphs.drop(resident.number)

    def problem(self, tenant: str) -> str:
        """See ModelExecutor: a device that is lost serves nobody."""
        return self._lost

    def forget_graphs(self) -> None:
        """Drop all captured ranges: before the device is divided anew, since each is bound to its stream's share."""
        self._graphs.clear()

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """See Executor."""
        with self._lock:
            place = self._lanes.get(launch.share)
            if place is None:
                place = self._lanes[launch.share] = self._open(launch.share)
            resident = self._models.get(launch.work.tenant)
        batch = self._batches.try_begin(launch)
        if resident is not None and not resident.begin():
            resident = None
        place[1].put(partial(self._submit, *place, _Flight(launch, on_end, batch), resident))

    def close(self) -> None:
        """See Executor."""
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for _, threads in lanes:
            threads.close()
        self._graphs.clear()
        self.device.close()

    def _open(self, partition: Share) -> tuple[StreamLane, StreamThreads]:
        lane = self.device.lane(partition)
        return lane, StreamThreads(lane, f"{partition.device}-{partition.cores[0]}")

    # --- the submitting thread ----------------------------------------------------------------------------------------

    def _submit(self, lane: StreamLane, threads: StreamThreads, flight: _Flight, resident: Resident | None) -> Waiting:
        urgent = resident is not None and resident.urgent
        try:
            if self._lost:
                raise DeviceLostError(self._lost)
            if isinstance(flight.batch, Exception):
                raise flight.batch
            if resident is None:
                raise ModelGoneError(flight.launch.work.tenant)
            began = time.perf_counter_ns()
            if not flight.launch.work.start:
                flight.batch.kept = _gathered(lane, flight.batch)
            flight.gather_ns = time.perf_counter_ns() - began
            work = partial(self._launch, lane, threads, flight, resident)
            with lane.stream(urgent):
                self._residents.with_room(resident, work, partial(_need, flight))
        except Exception as error:
            flight.error = self._reason(error)
            with suppress(Exception), lane.stream(urgent):  # the device may still read what was submitted before
                flight.events = (lane.record(),)
        return partial(self._wait, lane, threads, flight, resident)

    def _launch(self, lane: StreamLane, threads: StreamThreads, flight: _Flight, resident: Resident) -> None:
        """Submit everything of a launch to the current stream."""
        launch = flight.launch
        values = flight.tensors
        self._residents.bring(resident)
        graph = flight.graph = self._graph(lane, threads, launch, resident, values)
        began = lane.record()
        if graph is not None:
            graph.fill(values)
        elif not launch.work.start:
            values = {name: lane.upload(value) for name, value in values.items()}
        filled = lane.record()
        if graph is not None:
            results = graph.replay()
        else:
            results = resident.model.run(launch.work.start, launch.work.end, values, lane.threads)
        ran = lane.record()
        if launch.last:
            results = {name: lane.download(value) for name, value in results.items()}
        flight.results = results
        flight.events = (began, filled, ran, lane.record())

    def _graph(
        self, lane: StreamLane, threads: StreamThreads, launch: Launch, resident: Resident, values: Named
    ) -> RangeGraph | None:
        """The captured range, captured now if it is due; None to run it unit by unit."""
        if not self.device.has_graphs:
            return None
        shapes = tuple((name, tuple(value.shape), str(value.dtype)) for name, value in values.items())
        key = GraphKey(resident.number, launch.work.start, launch.work.end, shapes, launch.share, resident.urgent)
        graph = self._graphs.find(key)
        if graph is None and self._graphs.is_due(key):
            run = partial(resident.model.run, launch.work.start, launch.work.end, threads=lane.threads)
            try:
                with threads.quiet:
                    graph = RangeGraph.of(lane, values, resident.number, run)
            except Exception as error:
                if self.device.is_lost(error):
                    raise
                _log.info("model %r: units %d to %d run without a graph: %s", *_named(resident, launch), error)
                self._graphs.fail(key, reason_of(error))
            else:
                self._graphs.add(key, graph)
        return graph

    # --- the waiting thread -------------------------------------------------------------------------------------------

    def _wait(self, lane: StreamLane, threads: StreamThreads, flight: _Flight, resident: Resident | None) -> None:
        launch, error, timing = flight.launch, flight.error, Timing()
        try:
            if flight.events:
                flight.events[-1].wait()
            if error is None:
                timing = self._keep(lane, flight)
        except Exception as caught:
            error = self._reason(caught)
        with threads.quiet:
            flight.drop()
        if resident is not None:
            resident.end()
        flight.on_end(launch.id, error, timing)

    def _keep(self, lane: StreamLane, flight: _Flight) -> Timing:
        """Keep what a launch has left. Gives where its time went."""
        arrived = time.perf_counter_ns()
        launch, batch, results = flight.launch, flight.batch, flight.results
        assert isinstance(batch, BatchTensors)
        assert results is not None
        if launch.last:
            outputs = {name: array_of(value, lane.to_numpy) for name, value in results.items()}
            self._batches.finish(launch, batch, outputs)
        else:
            self._batches.pause(launch, batch, results)
        began, filled, ran, done = flight.events
        return Timing(
            flight.gather_ns + filled.ns_since(began),
            ran.ns_since(filled),
            done.ns_since(ran) + time.perf_counter_ns() - arrived,
        )

    def _reason(self, error: Exception) -> str:
        """A sentence for the client; takes note of a device that is lost."""
        if not self._lost and self.device.is_lost(error):
            self._lost = f"{self.device.name} is lost ({_first_line(causes(error)[-1])}): restart the server"
            _log.error("%s", self._lost)
        return self._lost or reason_of(error if isinstance(error, CotenantError) else RuntimeError(_first_line(error)))


def _first_line(error: BaseException) -> str:
    """What CUDA says of an error, without its advice for programmers of CUDA."""
    return str(error).partition("\n")[0] or type(error).__name__


def _gathered(lane: StreamLane, batch: BatchTensors) -> Named:
    """The inputs of a batch below each other, in memory of the host that the device can copy from."""
    tensors: dict[str, torch.Tensor] = {}
    for name, arrays in batch.gather().items():
        first = arrays[0]
        try:
            dtype = tensor_of(np.empty(0, first.dtype)).dtype
        except TypeError:
            raise TensorError(f"input {name!r} is {first.dtype}, which torch has no tensors of") from None
        shape = first.shape if len(arrays) == 1 else (sum(map(len, arrays)), *first.shape[1:])
        tensors[name] = lane.host(shape, dtype)
        view = array_of(tensors[name])
        if len(arrays) == 1:
            np.copyto(view, first)
        else:
            np.concatenate(arrays, out=view)
    return tensors


def _need(flight: _Flight) -> str:
    work = flight.launch.work
    size = sum(value.nbytes for value in flight.tensors.values())
    return f"units {work.start} to {work.end} of {work.items} rows ({size / MIB:.1f} MiB of tensors)"


def _named(resident: Resident, launch: Launch) -> tuple[str, int, int]:
    return resident.model.name, launch.work.start, launch.work.end
