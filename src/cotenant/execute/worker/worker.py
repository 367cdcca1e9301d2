"""The program of a worker process: it loads one model and runs the launches of its lanes."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from cotenant.execute.batches import Batches, BatchTensors, reason_of
from cotenant.execute.errors import ModelError
from cotenant.execute.launch_runner import LaunchRunner
from cotenant.execute.open_model import import_engine
from cotenant.execute.protocol import ModelSource, Sessions, Tensors, Timing
from cotenant.execute.runner import Runner
from cotenant.execute.source import open_source
from cotenant.execute.threads.lanes import run_gently, settle
from cotenant.execute.warm import warm_up
from cotenant.execute.worker.channel import (
    AddLane,
    Channel,
    Ended,
    ExpandRun,
    Expect,
    Keep,
    MessageError,
    Open,
    Prepare,
    Ready,
    Refused,
    ReleaseBatch,
    Reset,
    Run,
    SessionsPrepared,
    Started,
    WasReset,
)
from cotenant.execute.worker.memory_watch import MemoryWatch
from cotenant.execute.worker.shared_tensors import SharedBuffer, TensorLayout
from cotenant.linux import private_bytes
from cotenant.work import CPU, Share


class Worker:
    """One model, with a thread for each lane. The thread that calls `serve` receives lanes and releases."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lanes: list[threading.Thread] = []
        self._preparing: list[threading.Thread] = []
        self._sessions: Sessions = ()
        """The sessions that are loaded now."""
        self._batches = Batches(has_tasks=True)
        self._launches = LaunchRunner(self._batches)
        self._memory = MemoryWatch()

    @property
    def paused(self) -> int:
        """Number of batches of which tensors are kept."""
        return len(self._batches)

    def serve(self) -> None:
        """Load the model that the server names, and run launches until the server closes the channel."""
        self._channel.send(Started())
        message, _ = self._channel.receive_with()
        if isinstance(message, Expect):
            with suppress(Exception):  # opening the model says what is wrong
                run_gently(partial(import_engine, message.suffix))
            message, _ = self._channel.receive_with()
        if not isinstance(message, Open):
            return
        self._batches.max_answer_bytes = message.max_answer_bytes
        try:
            model = run_gently(partial(_open, message))
            for threads, ranges in message.sessions:  # a thread pool inherits the nice value of its maker
                model.prepare(ranges, threads)
        except ModelError as error:
            self._channel.send(Refused(error.reason, error.hint))
            return
        except Exception as error:  # any error of a library: report it to the server
            self._channel.send(Refused(f"{type(error).__name__}: {reason_of(error)}", "Look at the model's file"))
            return
        nice, opened = message.lane_nice, message
        self._sessions = message.sessions
        with model:
            self._channel.send(Ready())
            while message is not None:
                message, descriptors = self._channel.receive_with()
                if isinstance(message, AddLane):
                    name = "cotenant-lane-" + "-".join(map(str, message.cores))
                    lane = model, Share(message.cores), nice, descriptors
                    thread = threading.Thread(target=self._run_lane, args=lane, name=name, daemon=True)
                    thread.start()
                    self._lanes.append(thread)
                elif isinstance(message, ReleaseBatch):
                    self._batches.release(message.batch)
                elif isinstance(message, ExpandRun):
                    share = Share(message.cores)
                    if self._launches.expand(message.launch, share, self._expanded):
                        self._expanded(message.launch)
                elif isinstance(message, Prepare):  # on another thread: this one receives lanes and releases
                    try:
                        thread = threading.Thread(target=self._prepare, args=(model, message), daemon=True)
                        thread.start()
                        self._preparing = [each for each in self._preparing if each.is_alive()] + [thread]
                    except RuntimeError as error:
                        self._channel.send(SessionsPrepared(reason_of(error)), waits=True)
                elif isinstance(message, Keep):
                    model.keep(message.threads)
                    self._sessions = tuple(each for each in self._sessions if each[0] in message.threads)
                elif isinstance(message, Reset):
                    self._reset()
                    now = msgspec.structs.replace(opened, sessions=self._sessions)
                    self._channel.send(WasReset(message.token, now), waits=True)
            for thread in self._lanes:
                thread.join()

    def _reset(self) -> None:
        """Wait for lanes, which end with their engine, and for sessions in the making, and forget all batches."""
        for thread in (*self._lanes, *self._preparing):
            thread.join()
        self._lanes, self._preparing = [], []
        limit = self._batches.max_answer_bytes
        self._batches = Batches(has_tasks=True)
        self._batches.max_answer_bytes = limit
        self._launches = LaunchRunner(self._batches)

    def _expanded(self, launch: int) -> None:
        self._channel.send(ExpandRun(launch), waits=True)

    def _prepare(self, model: Runner, wanted: Prepare) -> None:
        """Load sessions and run each once at a higher nice value; thread pools inherit their maker's value."""
        reason = ""
        try:
            for threads, ranges in wanted.sessions:
                if threads == 1:
                    run_gently(partial(model.prepare, ranges, threads))
                else:
                    model.prepare(ranges, threads)
                run_gently(partial(warm_up, model, ranges, threads, wanted.shapes))
            self._sessions = (*self._sessions, *wanted.sessions)
        except Exception as error:  # report it to the server, which goes on without these sessions
            reason = reason_of(error)
        try:
            self._channel.send(SessionsPrepared(reason), waits=True)
        except OSError:  # the server is gone
            pass

    def _run_lane(self, model: Runner, share: Share, nice: int, descriptors: list[int]) -> None:
        lane = Channel(socket.socket(fileno=descriptors[0]))
        inputs, outputs = map(SharedBuffer, descriptors[1:])
        layouts: tuple[TensorLayout, ...] = ()

        def hand_out(run: Run, batch: BatchTensors, tensors: Tensors) -> None:
            nonlocal layouts
            self._batches.check_answer(tensors)  # before any copy is made
            layouts = outputs.write({name: (array,) for name, array in tensors.items()})

        def end(launch: int, error: str | None, timing: Timing) -> None:
            spent = timing.input_ns, timing.infer_ns, timing.output_ns
            ended = Ended(launch, error, *spent, layouts, timing.task_times, timing.steal_ns)
            try:
                self._channel.send(ended, waits=True)
            except MessageError as problem:
                self._channel.send(Ended(launch, reason_of(problem), 0, 0, 0), waits=True)

        settle(share.cores, nice)
        try:
            while isinstance(run := lane.receive(), Run):
                began = time.perf_counter_ns()
                layouts = ()
                self._launches.run(run, share, model, self._begin(run, inputs), hand_out, end, began)
                if self._memory.ended(private_bytes()) and (shrink := getattr(model, "shrink", None)) is not None:
                    shrink()
        finally:
            lane.close()
            inputs.close()
            outputs.close()

    def _begin(self, run: Run, inputs: SharedBuffer) -> BatchTensors | Tensors | Exception:
        try:
            if run.last and run.work.start == 0 and not run.part:
                return inputs.read(run.inputs, copy=False)
            # Copy inputs that may be live after this launch: the next launch overwrites the buffer.
            return self._batches.begin(run, None, [inputs.read(run.inputs, copy=True)])
        except Exception as error:
            return error


def _open(message: Open) -> Runner:
    """Open the model, with its single-threaded sessions, from the server's copies. Raises ModelError."""
    folder = Path(message.cache_dir) / message.graph
    how = message.arithmetic, message.follows
    model = open_source(ModelSource(Path(message.path), folder, message.tenant, CPU, *how))
    try:
        for threads, ranges in message.sessions:
            if threads == 1:
                model.prepare(ranges, threads)
    except Exception:
        model.close()
        raise
    return model
