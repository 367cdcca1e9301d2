"""One side of a co-run: a process on the cores of a partition that runs one batch of one model again and again.

Processes, because the server gives every tenant one: two threads of one interpreter would also wait for each other's
lock. All sides read the same monotonic clock.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any

from cotenant.errors import CotenantError
from cotenant.execute.threads.lanes import pin
from cotenant.measure.antagonist import ARRAY_BYTES, CopiedMemory
from cotenant.repository import ModelVersion, find_versions, model_names
from cotenant.techniques.partitions.coruns import ANTAGONIST, CoRunner
from cotenant.work import Share

_ANSWER_S = 120.0
_KEPT_MODELS = 4
"""Models that a side keeps open: loading one again takes longer than many launches."""
_SPARE = 3
_FEWEST = 2
"""The first launch of a loop does not count."""


@dataclass(frozen=True, slots=True)
class Loop:
    """When the launches of one loop began and ended, in order, in ns of the monotonic clock, and how long each took.

    On one core that is processor time of the thread that ran it: waiting for the memory is in it, being held up by
    others on the core is not. On several cores it is the time from beginning to end.
    """

    began_ns: tuple[int, ...]
    ended_ns: tuple[int, ...]
    took_ns: tuple[int, ...]


class Side:
    """Handle of one such process. It is idle between loops. Raises CotenantError when the process dies or cannot."""

    def __init__(self, root: Path, cores: tuple[int, ...], array_bytes: int = ARRAY_BYTES) -> None:
        context = multiprocessing.get_context("spawn")
        self.cores = cores
        self._ready: CoRunner | None = None
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, root, cores, array_bytes), daemon=True)
        self._process.start()
        far.close()

    def prepare(self, launch: CoRunner) -> None:
        """Load the tenant's model, make inputs of the batch, and run it a few times."""
        if launch != self._ready:
            self._ready = None
            self._pipe.send(("prepare", launch[0], launch[1]))
            self._answer(launch[0])
            self._ready = launch

    def begin(self, start_ns: int, until_ns: int) -> None:
        """Loop from one instant, starting no launch after another one; two launches always run."""
        self._pipe.send(("loop", start_ns, until_ns))

    def end(self) -> Loop:
        """Wait for the end of the loop."""
        return Loop(*self._answer("the loop"))

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self, what: str) -> Any:
        try:
            if self._pipe.poll(_ANSWER_S):
                kind, value = self._pipe.recv()
                if kind == "done":
                    return value
                raise CotenantError(f"{what}: {value}")
            problem = f"no answer within {_ANSWER_S:g} s"
        except (EOFError, OSError):
            problem = "its process has died"
        raise CotenantError(f"{what} on cores {', '.join(map(str, self.cores))}: {problem}; is there memory for it?")


def loop_together(those: Sequence[Side], window_ns: int) -> list[Loop]:
    """All of them loop from the same instant on for as long. Each must be prepared.

    Raises CotenantError when one of them cannot.
    """
    start_ns = time.monotonic_ns() + 2_000_000  # the orders need a moment to get there
    for side in those:
        side.begin(start_ns, start_ns + window_ns)
    found: list[Loop] = []
    problems: list[CotenantError] = []
    for side in those:  # every one has to be heard, or its answer would be taken for that to the next order
        try:
            found.append(side.end())
        except CotenantError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return found


def within(loop: Loop, others: Sequence[Loop]) -> list[int]:
    """Latencies of the launches, but the first, that ran wholly while every other one looped."""
    lower = max((other.began_ns[0] for other in others), default=0)
    upper = min((other.ended_ns[-1] for other in others), default=loop.ended_ns[-1])
    timed = list(zip(loop.began_ns, loop.ended_ns, loop.took_ns, strict=True))[1:]
    return [max(1, took) for begin, end, took in timed if begin >= lower and end <= upper]


def _serve(pipe: Connection, root: Path, cores: tuple[int, ...], array_bytes: int) -> None:
    """The process: answers orders until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    pin(cores[:1])
    work: Callable[[], object] = lambda: None  # noqa: E731
    models = _Models(root, cores)
    streams: _Streams | None = None
    with suppress(EOFError, OSError):
        while True:
            order, first, second = pipe.recv()
            try:
                if order == "loop":
                    if streams is not None:
                        streams.resume()
                    loop = _loop(work, first, second, len(cores) == 1)
                    if streams is not None:
                        streams.pause()
                    pipe.send(("done", loop))
                    continue
                if streams is not None:
                    streams.close()
                    streams = None
                if first == ANTAGONIST:
                    streams = _Streams(cores[: int(second)], array_bytes)
                    work = streams.step
                else:
                    work = models.work(str(first), int(second))
                for _ in range(_SPARE):
                    work()
                pipe.send(("done", None))
            except CotenantError as error:
                pipe.send(("failed", str(error)))
            except Exception as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _loop(work: Callable[[], object], start_ns: int, until_ns: int, on_one_core: bool) -> tuple[tuple[int, ...], ...]:
    clock = time.monotonic_ns
    watch = time.thread_time_ns if on_one_core else clock
    began: list[int] = []
    ended: list[int] = []
    took: list[int] = []
    while clock() < start_ns:
        pass
    while len(began) < _FEWEST or ended[-1] < until_ns:
        began.append(clock())
        before = watch()
        work()
        took.append(watch() - before)
        ended.append(clock())
    return tuple(began), tuple(ended), tuple(took)


class _Models:
    """Opened models of a repository, the last few used."""

    def __init__(self, root: Path, cores: tuple[int, ...]) -> None:
        self._root, self._cores = root, cores
        self._open: dict[str, Any] = {}

    def work(self, tenant: str, batch: int) -> Callable[[], object]:
        """One launch of a batch of the whole model, with made-up inputs of its largest shape."""
        from cotenant.execute.runner import to_numpy
        from cotenant.measure.inputs import make_inputs
        from cotenant.measure.solo import Effort

        opened = self._opened(tenant)
        runner = opened.runner
        sweep = opened.sweep([Share(self._cores)], Effort())
        inputs = make_inputs(runner.inputs, sweep.largest_shape, batch, sweep.max_batch > 1, sweep.samples)
        threads = self._cores if len(self._cores) > 1 else 1
        whole = (0, runner.unit_count)
        runner.prepare([whole], threads)
        return lambda: to_numpy(runner.run(*whole, inputs, threads))

    def _opened(self, tenant: str) -> Any:
        from cotenant.measure.opened_model import open_version

        found = self._open.pop(tenant, None)
        while found is None and len(self._open) >= _KEPT_MODELS:
            self._open.pop(next(iter(self._open))).runner.close()
        if found is None:
            found = open_version(self._root, _version(self._root, tenant))
        self._open[tenant] = found
        return found


def _version(root: Path, tenant: str) -> ModelVersion:
    for name in model_names(root):
        with suppress(CotenantError):
            for found in find_versions(root, name, {}):
                if found.tenant == tenant:
                    return found
    raise CotenantError(f"{root}: no model belongs to tenant {tenant!r}")


class _Streams:
    """Copies memory on some cores: on the first one in `step`, on the others between `resume` and `pause`."""

    def __init__(self, cores: Sequence[int], array_bytes: int) -> None:
        self._arrays = [CopiedMemory(array_bytes) for _ in cores]
        self._going, self._closed = Event(), Event()
        self._threads = [
            Thread(target=self._run, args=(core, array), daemon=True)
            for core, array in zip(cores[1:], self._arrays[1:], strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def step(self) -> None:
        """One launch: a chunk is copied."""
        self._arrays[0].copy()

    def resume(self) -> None:
        self._going.set()

    def pause(self) -> None:
        self._going.clear()

    def close(self) -> None:
        self._closed.set()
        self._going.set()
        for thread in self._threads:
            thread.join()
        self._arrays = []

    def _run(self, core: int, array: CopiedMemory) -> None:
        pin((core,))
        while self._going.wait() and not self._closed.is_set():
            array.copy()
