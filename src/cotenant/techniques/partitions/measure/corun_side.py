"""One side of a co-run: a process on the cores of a partition that loops one batch of one model.

Sides are processes like the workers of a server, so that no interpreter lock is shared. All sides read the same
monotonic clock.
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
from cotenant.linux import pin
from cotenant.measure.antagonist import ARRAY_BYTES, CopiedMemory
from cotenant.repository import ModelVersion, find_versions, model_names
from cotenant.techniques.partitions.coruns import ANTAGONIST, CoRunner
from cotenant.work import Share

_ANSWER_S = 120.0
_KEPT_MODELS = 4
"""Most models that a side keeps loaded."""
_SPARE = 3
_FEWEST = 2
"""Least launches of a loop; the first one does not count."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Starts and ends of the launches of one loop, in ns of the monotonic clock, and their latencies.

    `took_ns` is CPU time of the thread on one core: it includes memory stalls, but not preemption. On several cores it
    is wall time.
    """

    began_ns: tuple[int, ...]
    ended_ns: tuple[int, ...]
    took_ns: tuple[int, ...]


class Side:
    """Handle of the process of a side. Methods raise CotenantError when the process dies or a model fails."""

    def __init__(self, root: Path, cores: tuple[int, ...], array_bytes: int = ARRAY_BYTES) -> None:
        context = multiprocessing.get_context("spawn")
        self.cores = cores
        self._ready: CoRunner | None = None
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, root, cores, array_bytes), daemon=True)
        self._process.start()
        far.close()

    def prepare(self, launch: CoRunner) -> None:
        """Load the tenant's model, make inputs of the batch, and warm up."""
        if launch != self._ready:
            self._ready = None
            self._pipe.send(("prepare", launch[0], launch[1]))
            self._answer(launch[0])
            self._ready = launch

    def begin(self, start_ns: int, until_ns: int) -> None:
        """Start a loop at `start_ns` that begins no launch after `until_ns`, but runs at least two launches."""
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
    """Run the loops of prepared sides at the same time, for `window_ns`. Raises CotenantError when one fails."""
    start_ns = time.monotonic_ns() + 2_000_000  # time for the orders to arrive
    for side in those:
        side.begin(start_ns, start_ns + window_ns)
    found: list[Loop] = []
    problems: list[CotenantError] = []
    for side in those:  # read every answer, or it would be taken for that to the next order
        try:
            found.append(side.end())
        except CotenantError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return found


def within(loop: Loop, others: Sequence[Loop]) -> list[int]:
    """Latencies of the launches, except the first, that ran while every other loop was running."""
    lower = max((other.began_ns[0] for other in others), default=0)
    upper = min((other.ended_ns[-1] for other in others), default=loop.ended_ns[-1])
    timed = list(zip(loop.began_ns, loop.ended_ns, loop.took_ns, strict=True))[1:]
    return [max(1, took) for begin, end, took in timed if begin >= lower and end <= upper]


def _serve(pipe: Connection, root: Path, cores: tuple[int, ...], array_bytes: int) -> None:
    """Main function of the process: carries out orders until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
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
    """The most recently used models of a repository."""

    def __init__(self, root: Path, cores: tuple[int, ...]) -> None:
        self._root, self._cores = root, cores
        self._open: dict[str, Any] = {}

    def work(self, tenant: str, batch: int) -> Callable[[], object]:
        """Function for one launch of a batch of the whole model, with synthetic inputs of its largest shape."""
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
    """Antagonist that copies memory: on the first core in `step`, on the others between `resume` and `pause`."""

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
        """One launch: copy a chunk."""
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
