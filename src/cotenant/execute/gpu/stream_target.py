"""The streams of a GPU's shares as a place where models are opened, measured and run."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from cotenant.core.actions import Launch
from cotenant.execute.errors import ModelError
from cotenant.execute.protocol import Inputs, Loaded, LoadSpec, ModelExecutor, Run, Timing
from cotenant.execute.runner import Runner
from cotenant.work import Share, Work

if TYPE_CHECKING:
    from cotenant.execute.gpu.streams import StreamDevice, StreamLane

T = TypeVar("T")
_FLOOR_RUNS = 50


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


class StreamExecutor(ModelExecutor, Protocol):
    """What measuring on streams needs of an executor, beside what serving does."""

    device: StreamDevice
    cores: Sequence[int]
    """Those of the host beside the device."""

    def lend(self, model: Runner, spec: LoadSpec) -> Loaded:
        """As `load`, for a caller that keeps the model."""

    def do(self, share: Share, work: Callable[[StreamLane], T]) -> T:
        """Do work with the streams of a share, on the thread of its lane, and give what it gives."""


class StreamTarget:
    """Streams of a device: what is measured there runs through the executor that serves."""

    unit = "SM"

    def __init__(self, executor: StreamExecutor) -> None:
        self._executor = executor
        self.device = executor.device.name
        self.is_padded = not executor.device.why_no_graphs
        self.cores = tuple(executor.cores)
        """Those of the host beside it."""
        self._numbers = itertools.count(-1, -1)  # those of a server's launches, batches and queries are from 0 on

    def runs_inline(self, share: Share) -> bool:
        """See TargetDevice."""
        return False

    def at(self, share: Share) -> AbstractContextManager[None]:
        """See TargetDevice: the lane's own thread does."""
        return nullcontext()

    @contextmanager
    def ready(self, model: Runner, spec: LoadSpec) -> Iterator[Run]:
        """See TargetDevice."""
        name = f"{model.name}, measured {next(self._numbers)}"
        loaded = self._executor.lend(model, spec)
        self._executor.add_model(name, loaded)
        try:
            yield partial(self._run, model, name, spec.max_batch > 1, {})
        finally:
            self._executor.remove_model(name)
            loaded.close()

    def unit_ns(self, model: Runner, inputs: Inputs, share: Share) -> tuple[int, ...]:
        """See TargetDevice."""
        torch_model: Any = model
        found: tuple[int, ...] = self._executor.do(share, lambda streams: torch_model.unit_ns(inputs, streams))
        return found

    def do(self, share: Share, work: Callable[[StreamLane], T]) -> T:
        """Do work with the streams of a share, on the thread of its lane, and give what it gives."""
        return self._executor.do(share, work)

    def floor_ns(self, share: Share) -> int:
        """See TargetDevice: a number goes to the device and comes back."""
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
            self._executor.start(Launch(number, query, (query,), work, is_last, share, believed), end)
            ended.wait()
            took_ns[work] = time.perf_counter_ns() - began
            if errors:
                self._executor.release(query)
                self._executor.discard(query)
                raise ModelError(model.path, errors[0], "Check the shapes and values of its inputs")
        self._executor.take(query)
