"""What a worker process does: it loads one model and runs the launches that come over its lanes' channels."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cotenant.execute.batches import ModelGoneError, for_client, for_engine, reason_of
from cotenant.execute.errors import ModelError
from cotenant.execute.runner import Runner, open_model, to_numpy
from cotenant.execute.threads.lanes import run_gently
from cotenant.execute.warm import warm_up
from cotenant.execute.worker.channel import (
    AddLane,
    Channel,
    Ended,
    Keep,
    MessageError,
    Open,
    Prepare,
    Prepared,
    Ready,
    Refused,
    ReleaseBatch,
    Run,
    Started,
)
from cotenant.execute.worker.lane_place import LanePlace, place_of
from cotenant.execute.worker.shared_tensors import Layout, SharedBuffer, copied
from cotenant.work import CPU


class Worker:
    """One model, and a thread for each lane. The thread that calls `serve` waits for lanes and releases."""

    def __init__(self, channel: Channel, load_nice: int) -> None:
        self._channel = channel
        self._load_nice = load_nice
        self._lanes: list[threading.Thread] = []
        self._batches: dict[int, Mapping[str, Any]] = {}
        """Tensors that are live where each paused batch stands."""

    @property
    def paused(self) -> int:
        """How many batches tensors are kept of."""
        return len(self._batches)

    def serve(self) -> None:
        """Load the model that the server names and run launches until it closes the channel."""
        self._channel.send(Started())
        message, _ = self._channel.receive_with()
        if not isinstance(message, Open):
            return
        try:
            model = run_gently(partial(_open, message), self._load_nice)
            for threads, ranges in message.sessions:
                model.prepare(
                    ranges, threads if message.device == CPU else 1
                )  # a pool of threads is as nice as the thread that makes it
        except ModelError as error:
            self._channel.send(Refused(error.reason, error.mend))
            return
        except Exception as error:  # whatever a library makes of a strange file: the server has to know
            self._channel.send(Refused(f"{type(error).__name__}: {reason_of(error)}", "Look at the model's file"))
            return
        nice, device = message.lane_nice, message.device
        with model:
            self._channel.send(Ready())
            while message is not None:
                message, descriptors = self._channel.receive_with()
                if isinstance(message, AddLane):
                    self._add_lane(model, message.cores, place_of(device, message.cores, nice), descriptors)
                elif isinstance(message, ReleaseBatch):
                    self._batches.pop(message.batch, None)
                elif isinstance(message, Prepare):  # beside this thread, which lanes and releases wait for
                    threading.Thread(target=self._prepare, args=(model, message, device), daemon=True).start()
                elif isinstance(message, Keep):
                    model.keep(message.threads)
            for thread in self._lanes:
                thread.join()

    def _add_lane(self, model: Runner, cores: tuple[int, ...], place: LanePlace, descriptors: list[int]) -> None:
        end, inputs, outputs = descriptors
        arguments = (
            model,
            place,
            Channel(socket.socket(fileno=end)),
            SharedBuffer(inputs),
            SharedBuffer(outputs),
        )
        name = "cotenant-lane-" + "-".join(map(str, cores))
        thread = threading.Thread(target=self._run_lane, args=arguments, name=name, daemon=True)
        thread.start()
        self._lanes.append(thread)

    def _prepare(self, model: Runner, wanted: Prepare, device: str) -> None:
        """Load sessions and run each once, gently; a pool of threads is as nice as the thread that makes it."""
        reason = ""
        try:
            for threads, ranges in wanted.sessions:
                used = threads if device == CPU else 1
                if used == 1:
                    run_gently(partial(model.prepare, ranges, used), self._load_nice)
                else:
                    model.prepare(ranges, used)
                run_gently(partial(warm_up, model, ranges, used, wanted.shapes), self._load_nice)
        except Exception as error:  # the server has to know, and goes on as it was
            reason = reason_of(error)
        try:
            self._channel.send(Prepared(reason), waits=True)
        except OSError:  # the server has gone
            pass

    def _run_lane(
        self,
        model: Runner,
        place: LanePlace,
        lane: Channel,
        inputs: SharedBuffer,
        outputs: SharedBuffer,
    ) -> None:
        with place.settle():
            while isinstance(run := lane.receive(), Run):
                ended = self._run(model, place, run, inputs, outputs)
                try:
                    self._channel.send(ended, waits=True)
                except MessageError as error:
                    self._channel.send(Ended(run.launch, reason_of(error), 0, 0, 0), waits=True)

    def _run(self, model: Runner, place: LanePlace, run: Run, inputs: SharedBuffer, outputs: SharedBuffer) -> Ended:
        began = started = ran = time.perf_counter_ns()
        error: str | None = None
        layouts: tuple[Layout, ...] = ()
        try:
            if run.start == 0:
                views = inputs.read(run.inputs, copy=False)
                tensors: Mapping[str, Any] = {name: for_engine(array) for name, array in views.items()}
                if not run.last:  # some may be live beyond this launch, while the next one's take their place
                    tensors = copied(tensors)
            elif run.batch in self._batches:
                tensors = self._batches[run.batch]
            else:
                raise ModelGoneError(model.name)
            started = ran = time.perf_counter_ns()
            tensors = model.run(run.start, run.end, tensors, place.threads)
            place.finish()
            ran = time.perf_counter_ns()
            if run.last:
                self._batches.pop(run.batch, None)
                layouts = outputs.write({name: (array,) for name, array in for_client(to_numpy(tensors)).items()})
            else:
                self._batches[run.batch] = tensors
        except Exception as caught:
            ran = max(started, time.perf_counter_ns())
            self._batches.pop(run.batch, None)
            error = reason_of(caught)
        return Ended(run.launch, error, started - began, ran - started, time.perf_counter_ns() - ran, layouts)


def _open(message: Open) -> Runner:
    """Open the model with its sessions, from what the server opened. Raises ModelError."""
    place = Path(message.path), Path(message.cache_dir)
    model = open_model(place[0], cache_dir=place[1], name=message.tenant, device=message.device, content=message.graph)
    try:
        for threads, ranges in message.sessions:
            if threads == 1:
                model.prepare(ranges, threads)
    except Exception:
        model.close()
        raise
    return model
