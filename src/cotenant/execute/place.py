"""Where models are opened, measured and run: on cores of this machine, or on the streams of a GPU's shares."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from cotenant.core.actions import Launch
from cotenant.execute.errors import ModelError
from cotenant.execute.protocol import LoadSpec, Timing
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.threads.lanes import pin
from cotenant.work import CPU, Share, Work

if TYPE_CHECKING:
    from cotenant.execute.gpu.streams import StreamLane
    from cotenant.execute.torch.executor import TorchExecutor

_FLOOR_RUNS = 50
_COPY_RUNS = 30
Inputs = Mapping[str, Any]
Run = Callable[[Share, Inputs, Sequence[tuple[int, int]]], None]
"""Runs ranges of units in turn in a share, the first on these inputs, and waits for what comes out of the last."""


class Place(Protocol):
    """A device to measure on. `device` is where models have to be opened."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""

    @property
    def unit(self) -> str:
        """What a share has some of, for messages."""

    @property
    def is_padded(self) -> bool:
        """Whether a batch runs as the next larger one of those that are measured."""

    def runs_inline(self, share: Share) -> bool:
        """Whether what runs in this share runs on the calling thread alone, so that its processor time tells all."""

    def at(self, share: Share) -> AbstractContextManager[None]:
        """Inside, the calling thread runs what it is given in this share."""

    def ready(self, model: Runner, spec: LoadSpec) -> AbstractContextManager[Run]:
        """A model as it is served, while the context lasts. Raises ModelError when it cannot be."""

    def unit_ns(self, model: Runner, inputs: Inputs, share: Share) -> tuple[int, ...]:
        """Median latency of each unit in ns, run one by one."""

    def floor_ns(self, share: Share) -> int:
        """Median latency in ns of a launch that does nothing; 0 where nobody waits for a device."""


class CorePlace:
    """Cores of this machine: the calling thread sits on the first, a runner's pool on the others."""

    device = CPU
    unit = "core"
    is_padded = False

    def runs_inline(self, share: Share) -> bool:
        """See Place."""
        return share.size == 1

    @contextmanager
    def at(self, share: Share) -> Iterator[None]:
        """See Place."""
        before = os.sched_getaffinity(0)
        pin(share.cores[:1])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    @contextmanager
    def ready(self, model: Runner, spec: LoadSpec) -> Iterator[Run]:
        """See Place."""
        for threads, ranges in spec.sessions:
            model.prepare(ranges, threads)

        def run(share: Share, inputs: Inputs, ranges: Sequence[tuple[int, int]]) -> None:
            tensors, threads = inputs, share.cores if share.size > 1 else 1
            for start, end in ranges:
                tensors = model.run(start, end, tensors, threads)
            to_numpy(tensors)  # which waits, where others than this thread run it

        yield run

    def unit_ns(self, model: Runner, inputs: Inputs, share: Share) -> tuple[int, ...]:
        """See Place."""
        with self.at(share):
            model.run(0, model.unit_count, inputs)  # which says it well when that cannot be
            return model.unit_ns(inputs)

    def floor_ns(self, share: Share) -> int:
        """See Place."""
        return 0


class IdentityModel:
    """A model for streams that gives its input back: what it takes is the executor's own time."""

    path = Path("nothing")
    name = "nothing"
    inputs = ()
    unit_count = 1

    def prepare(self, ranges: Iterable[tuple[int, int]]) -> None:
        """There is nothing to build."""

    def check_values(self, tensors: Inputs) -> None:
        """See StreamModel: it has no indices."""

    def why_eager(self, start: int, end: int) -> str:
        """It is never captured."""
        return "there is nothing to capture"

    def run(self, start: int, end: int, tensors: Inputs, threads: object) -> Inputs:
        """What it is given."""
        return tensors


class StreamPlace:
    """Streams of a device: what is measured there runs through the executor that serves."""

    unit = "SM"

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self.device = executor.device.name
        self.is_padded = not executor.device.why_no_graphs
        self.cores = tuple(executor.cores)
        """Those of the host beside it."""
        self._numbers = itertools.count(-1, -1)  # those of a server's launches, batches and queries are from 0 on

    def runs_inline(self, share: Share) -> bool:
        """See Place."""
        return False

    def at(self, share: Share) -> AbstractContextManager[None]:
        """See Place: the lane's own thread does."""
        return nullcontext()

    @contextmanager
    def ready(self, model: Runner, spec: LoadSpec) -> Iterator[Run]:
        """See Place."""
        name = f"{model.name}, measured {next(self._numbers)}"
        loaded = self._executor.lend(model, spec)
        self._executor.add_model(name, loaded)
        try:
            yield partial(self._run, model, name, spec.max_batch > 1, {})
        finally:
            self._executor.remove_model(name)
            loaded.close()

    def unit_ns(self, model: Runner, inputs: Inputs, share: Share) -> tuple[int, ...]:
        """See Place."""
        torch_model: Any = model
        found: tuple[int, ...] = self._executor.do(share, lambda streams: torch_model.unit_ns(inputs, streams))
        return found

    def copy_ns(self, share: Share, size_bytes: int) -> tuple[int, int]:
        """What copying so much takes, until who waits knows that it is there: median ns to the host, and back."""

        def measured(streams: StreamLane) -> tuple[int, int]:
            from cotenant.techniques.placement.execute.placed_torch import copy_times

            down, up = copy_times(streams, size_bytes, _COPY_RUNS)
            return round(median(down)), round(median(up))

        return self._executor.do(share, measured)

    def floor_ns(self, share: Share) -> int:
        """See Place: a number goes to the device and comes back."""
        inputs = {"x": np.zeros(1, np.float32)}
        samples = []
        with self.ready(cast(Runner, IdentityModel()), LoadSpec((share,), (0, 1))) as run:
            for _ in range(_FLOOR_RUNS):
                began = time.perf_counter_ns()
                run(share, inputs, [(0, 1)])
                samples.append(time.perf_counter_ns() - began)
        return round(median(samples))

    def _run(
        self,
        model: Runner,
        name: str,
        is_batched: bool,
        took_ns: dict[Work, int],
        share: Share,
        inputs: Inputs,
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        query = next(self._numbers)
        ended = threading.Event()
        errors: list[str] = []

        def end(_: int, error: str | None, __: Timing) -> None:
            errors.extend([error] if error else [])
            ended.set()

        self._executor.put(query, inputs)
        rows = len(next(iter(inputs.values()))) if is_batched else 1
        for start, stop in ranges:
            ended.clear()
            work, number = Work(name, 0, rows, start, stop), next(self._numbers)
            is_last, believed = stop == model.unit_count, took_ns.get(work, 0)
            began = time.perf_counter_ns()
            self._executor.start(Launch(number, query, (query,), work, is_last, share, believed, 0), end)
            ended.wait()
            took_ns[work] = time.perf_counter_ns() - began
            if errors:
                self._executor.release(query)
                self._executor.discard(query)
                raise ModelError(model.path, errors[0], "Check the shapes and values of its inputs")
        self._executor.take(query)
