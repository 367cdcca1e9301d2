"""The executor that runs launches with torch on the streams of a device.

The thread of a lane submits a whole launch: copies of inputs, units, copies of outputs, an event. One thread polls the
events of all lanes. See docs/torch.md, "Streams".
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from typing_extensions import override

from cotenant.core.actions import Launch
from cotenant.errors import CotenantError
from cotenant.execute.base import BaseExecutor
from cotenant.execute.batches import BatchTensors, ModelGoneError, reason_of
from cotenant.execute.errors import ModelError
from cotenant.execute.gpu.chains import Chains
from cotenant.execute.gpu.completions import Completions
from cotenant.execute.gpu.lane_thread import LaneThread
from cotenant.execute.gpu.launch_tensors import form_at, results_of, values_of
from cotenant.execute.gpu.prepare import Preparation
from cotenant.execute.gpu.resident import MIB, Resident, StreamModel
from cotenant.execute.gpu.stream_target import StreamTarget
from cotenant.execute.gpu.streams import Event, Named, StreamDevice, StreamLane, causes
from cotenant.execute.protocol import Loaded, LoadSpec, ModelSource, OnEnd, TargetDevice, Timing
from cotenant.execute.runner import Runner
from cotenant.execute.source import opened_by
from cotenant.execute.strategy import WholeLaunch
from cotenant.execute.torch.model import first_line
from cotenant.work import Share

T = TypeVar("T")
_log = logging.getLogger("cotenant.torch")


class DeviceLostError(RuntimeError):
    """The device accepts no more work."""


class DeviceFullError(RuntimeError):
    """A launch does not fit into the memory of its device."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A launch under way, with all tensors that the device may still read or write for it.

    A launch that waits for others is submitted behind them; `on_end` is None until it is started. `before` are launches
    that have ended on the device when this one begins.
    """

    launch: Launch
    batch: BatchTensors | Exception
    resident: Resident | None
    executor: TorchExecutor
    lane: LaneThread
    after: tuple[_Flight, ...] = ()
    before: frozenset[int] = frozenset()
    on_end: OnEnd | None = None
    is_cancelled: bool = False
    is_submitted: bool = False
    due_ns: int = 0
    values: Named = field(default_factory=dict)
    results: Named = field(default_factory=dict)
    by_strategy: WholeLaunch | None = None
    events: tuple[Event, ...] = ()
    """Before and after the copies of inputs, after the units, and at the end; only the last without timing."""
    gather_ns: int = 0
    began_ns: int = 0
    error: str | None = None

    def drop(self) -> None:
        """Free all tensors."""
        del self.batch, self.values, self.results, self.by_strategy

    def is_over(self) -> bool:
        """Whether the device has run it, and it was started; an error of the device also ends it."""
        try:
            return self.on_end is not None and (not self.events or self.events[-1].is_reached())
        except Exception as error:
            self.error = self.executor.reason(error)
            return True

    def land(self) -> None:
        """Report its end."""
        self.executor.land(self)


class TorchExecutor(BaseExecutor):
    """Runs launches on the streams of a device. Tensors of a batch stay on the device between its segments.

    Models are captured when they are loaded, if the device has graphs; launches without a captured graph run unit by
    unit. A launch that raises fails alone, with the reason; its lane goes on. Tensors that tasks of a batch pass to
    each other stay on the device, where streams wait for each other. Run strategies may use `cores` of the host.
    """

    lanes_change = False
    has_tasks = True

    def __init__(self, device: StreamDevice, cores: Sequence[int] = ()) -> None:
        super().__init__()
        self.device = device
        self.cores = cores
        self.chains = Chains()
        self._ends = Completions(device.name)
        self._numbers = itertools.count(1)
        self._models: dict[str, Resident] = {}
        self._lanes: dict[Share, LaneThread] = {}
        self._flights: dict[int, _Flight] = {}
        """Launches under way, by number."""
        self._submitted = threading.Condition()
        self._followers = 0
        """Number of lanes that wait until launches of other lanes are submitted."""
        self._lost = ""

    @property
    @override
    def target(self) -> TargetDevice:
        return StreamTarget(self)

    def load(self, tenant: str, model: Runner | ModelSource, spec: LoadSpec) -> Loaded:
        """Open the model, and capture it on all its lanes. Host memory is not limited."""
        return self._take_in(opened_by(model), spec, is_shared=False)

    def load_shared(self, model: Runner, spec: LoadSpec) -> Loaded:
        """Like `load`, but the caller keeps the model and closes it."""
        return self._take_in(model, spec, is_shared=True)

    def _take_in(self, model: Runner, spec: LoadSpec, *, is_shared: bool) -> Loaded:
        if not hasattr(model, "why_eager"):
            raise ModelError(
                model.path, f"{self.device.name} only runs torch models", "Export it with torch.export to model.pt2"
            )
        resident = Resident(next(self._numbers), cast(StreamModel, model), spec, self._leave, is_shared)
        try:
            self.prepare(resident, spec)
        except Exception:
            self._leave(resident)
            raise
        return resident

    def prepare(self, model: Loaded, spec: LoadSpec) -> None:
        """Capture each share, shape and batch size on the thread of its lane, and run it twice."""
        resident = cast(Resident, model)
        resident.model.prepare(spec.ranges)
        preparing = Preparation(self.device, self.chains, resident, spec, self.cores)
        for step in preparing.steps:
            lane = self._lane(step[0])
            lane.do(partial(preparing.capture, step, lane.streams, partial(self._ends.wait_idle, lane)))
        preparing.tell()

    def keep(self, model: Loaded, spec: LoadSpec) -> None:
        """Do nothing: lanes do not change."""

    def add_model(self, tenant: str, model: Loaded) -> None:
        """Let launches of the tenant run this model."""
        with self._lock:
            self._models[tenant] = cast(Resident, model)

    def remove_model(self, tenant: str) -> None:
        """Forget the model of a tenant."""
        with self._lock:
            self._models.pop(tenant, None)

    def problem(self, tenant: str) -> str:
        """Why the device is lost, for every tenant; "" while it works."""
        return self._lost

    @override
    def launch_counts(self) -> Mapping[str, int]:
        return {"captured": self.chains.replayed, "eager": self.chains.eager}

    def _start(self, launch: Launch, on_end: OnEnd) -> None:
        flight = self._flights.get(launch.id)
        is_new = flight is None
        if flight is None:
            flight = self._book(launch)
        flight.due_ns = time.monotonic_ns() + launch.predicted_ns
        flight.on_end = on_end
        if is_new:
            flight.lane.put(partial(self._take_off, flight))
        else:
            self._ends.look()

    def enqueue(self, launch: Launch) -> None:
        """Submit the launch behind those that it waits for; the device orders them."""
        flight = self._book(launch)
        flight.after = tuple(self._flights[other] for other in launch.after if other in self._flights)
        flight.before = frozenset(launch.after).union(*(each.before for each in flight.after))
        flight.lane.put(partial(self._take_off, flight))

    @override
    def release(self, batch: int) -> None:
        for flight in [each for each in list(self._flights.values()) if each.launch.batch == batch]:
            if flight.on_end is None:
                flight.is_cancelled = True
                flight.on_end = _ignore_end
                self._ends.look()
        super().release(batch)

    def close(self, until_s: float | None = None) -> None:
        """Stop. If a launch has not ended by then, its device is closed by the end of the process."""
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        have_ended = [lane.close(until_s) for lane in lanes]
        super().close(until_s)
        if self._ends.close(until_s) and all(have_ended):
            self.device.close()

    def do(self, share: Share, work: Callable[[StreamLane], T]) -> T:
        """Run `work` with the streams of a share on the thread of its lane; return its result. For measurements."""
        lane = self._lane(share)
        return lane.do(lambda: work(lane.streams))

    # --- bookkeeping ------------------------------------------------------------------------------------------------

    def _lane(self, share: Share) -> LaneThread:
        with self._lock:
            lane = self._lanes.get(share)
            if lane is None:
                lane = LaneThread(self.device.lane(share), f"{share.device}-{share.cores[0]}")
                self._lanes[share] = lane
            return lane

    def _book(self, launch: Launch) -> _Flight:
        lane = self._lanes.get(launch.share) or self._lane(launch.share)
        resident = self._models.get(launch.work.tenant)
        if resident is not None and not resident.begin():
            resident = None
        flight = _Flight(launch, self._batches.try_begin(launch), resident, self, lane)
        self._flights[launch.id] = flight
        return flight

    def _leave(self, resident: Resident) -> None:
        with self.device.capturing:
            self.chains.drop(resident.number)
            self.chains.drop(-resident.number)

    # --- the lane's thread --------------------------------------------------------------------------------------------

    def _take_off(self, flight: _Flight) -> None:
        """Submit a launch after those that it waits for, and let its end be polled."""
        if flight.after:
            with self._submitted:
                self._followers += 1  # before the check below: a submitter reads it after it submits
                self._submitted.wait_for(lambda: all(each.is_submitted for each in flight.after))
                self._followers -= 1
        self._submit(flight)
        self._ends.add(flight.lane, flight)

    def _submit(self, flight: _Flight) -> None:
        lane, resident = flight.lane.streams, flight.resident
        urgent = resident is not None and resident.urgent
        flight.began_ns = time.perf_counter_ns()
        try:
            if self._lost:
                raise DeviceLostError(self._lost)
            if flight.lane.problem is not None:
                raise flight.lane.problem
            if isinstance(flight.batch, Exception):
                raise flight.batch
            if resident is None or flight.is_cancelled:
                raise ModelGoneError(flight.launch.work.tenant)
            with lane.stream(urgent):
                for other in flight.after:
                    if other.events:
                        lane.follow(other.events[-1])
                flight.values = values_of(flight.launch.work, flight.batch, flight.before, resident.model, lane)
                flight.gather_ns = 0 if flight.launch.work.start else time.perf_counter_ns() - flight.began_ns
                self._with_room(flight, partial(self._launch, flight, resident, flight.batch))
        except Exception as error:
            flight.error = self.reason(error)
            with suppress(Exception), lane.stream(urgent):  # the device may still read earlier copies
                flight.events = (lane.record(),)
        flight.after = ()
        flight.is_submitted = True
        if self._followers:
            with self._submitted:
                self._submitted.notify_all()

    def _launch(self, flight: _Flight, resident: Resident, batch: BatchTensors) -> None:
        """Submit all work of a launch to the current stream."""
        lane, work, values, tasks = flight.lane, flight.launch.work, flight.values, batch.tasks
        share, form = flight.launch.share, form_at(work, values, batch, resident.max_batch)
        is_whole = tasks is None and not work.start and flight.launch.last
        way = resident.ways.get(share) if is_whole else None
        number = resident.number if way is None else -resident.number
        chain: Any = self.chains.find(number, share, form, work.start, work.end)
        if way is not None:
            chain = flight.by_strategy = way.launch(form.rows, chain)
        lane.count += 1
        is_timed = lane.count % self.device.timed_every == 0
        record, streams = lane.streams.record, lane.streams
        events = [record(True)] if is_timed else []
        if chain is not None:
            chain.fill(work.start, values)
        elif not work.start:
            values = {name: streams.upload(value) for name, value in values.items()}
        if is_timed:
            events.append(record(True))
        if chain is not None:
            form = form.padded(chain.rows)
            results = chain.replay(work.start, work.end)
        else:
            results = resident.model.run(work.start, work.end, values, streams.threads)
        if is_timed:
            events.append(record(True))
        if tasks is not None or flight.launch.last:
            results = results_of(work, batch, resident.model, form, results)
        if flight.launch.last:
            results = {name: streams.download(value) for name, value in results.items()}
        else:
            if chain is not None:  # the next launch of this lane overwrites it
                results = {name: value.clone() for name, value in results.items()}
            if tasks is not None:
                tasks.submit(work, results, flight.launch.id)
                tasks.form = form.of_rows(tasks.items)
        batch.form = form
        flight.results = results
        flight.events = (*events, record(is_timed))

    def _with_room(self, flight: _Flight, work: Callable[[], None]) -> None:
        """Run `work`; run it again if it finds no memory, after torch has freed its cache."""
        for is_last in (False, True):
            try:
                work()
                return
            except Exception as error:
                if not self.device.is_out_of_memory(error):
                    raise
            free, total = self.device.room()
            if is_last:
                raise DeviceFullError(
                    f"out of memory on {self.device.name}: no room for {_need(flight)}; {free / MIB:.0f} of "
                    f"{total / MIB:.0f} MiB are free"
                )

    # --- the thread that polls ends --------------------------------------------------------------------------------

    def land(self, flight: _Flight) -> None:
        """Report the end of a launch that the device has run."""
        arrived, launch, timing = time.perf_counter_ns(), flight.launch, Timing()
        try:
            if flight.error is None:
                timing = self._kept(flight, arrived)
        except Exception as caught:
            flight.error = self.reason(caught)
        if not self._lost:  # freeing memory of a lost device ends the process
            flight.drop()
            del self._flights[launch.id]
        if flight.resident is not None:
            flight.resident.end()
        assert flight.on_end is not None
        flight.on_end(launch.id, flight.error, timing)

    def _kept(self, flight: _Flight, arrived: int) -> Timing:
        """Keep the tensors that a launch leaves. Returns its timing; without timed events, all time is its units'."""
        launch, batch = flight.launch, flight.batch
        if flight.is_cancelled or isinstance(batch, Exception):
            return Timing()
        outputs = {n: flight.lane.streams.to_numpy(each) for n, each in flight.results.items()} if launch.last else {}
        if batch.tasks is not None and flight.resident is not None:
            if (joined := self._batches.join(launch, flight.resident.outputs, outputs, {})) is not None:
                self._batches.finish(launch, *joined)
        elif launch.last:
            self._batches.finish(launch, batch, outputs)
        else:
            self._batches.pause(launch, batch, flight.results)
        output_ns = time.perf_counter_ns() - arrived
        task_times = flight.by_strategy.times() if flight.by_strategy is not None else ()
        if len(flight.events) == 1:
            return Timing(flight.gather_ns, arrived - flight.began_ns - flight.gather_ns, output_ns, task_times)
        began, filled, ran, done = cast(Any, flight.events)
        copied_ns, output_ns = filled.ns_since(began), done.ns_since(ran) + output_ns
        return Timing(flight.gather_ns + copied_ns, ran.ns_since(filled), output_ns, task_times)

    def reason(self, error: Exception) -> str:
        """A sentence for the client; notes a lost device."""
        if not self._lost and self.device.is_lost(error):
            self._lost = f"{self.device.name} is lost ({first_line(causes(error)[-1])}): restart the server"
            _log.error("%s", self._lost)
        return self._lost or reason_of(error if isinstance(error, CotenantError) else RuntimeError(first_line(error)))


def _ignore_end(launch: int, error: str | None, timing: Timing) -> None:
    """The end of a cancelled launch that was submitted behind others."""


def _need(flight: _Flight) -> str:
    work, size_mib = flight.launch.work, sum(value.nbytes for value in flight.values.values()) / MIB
    return f"units {work.start} to {work.end} of {work.items} rows ({size_mib:.1f} MiB of tensors)"
