"""The streams of a GPU's shares as a target device, on which models are opened, measured and run."""

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
    """A model on streams that returns its input: its latency is the executor's overhead."""

    path = Path("nothing")
    name = "nothing"
    inputs = ()
    unit_count = 1

    def prepare(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: there is nothing to build."""

    def check_values(self, tensors: Inputs) -> None:
        """Do nothing: no input is an index."""

    def why_eager(self, start: int, end: int) -> str:
        """The model is never captured."""
        return "there is nothing to capture"

    def run(self, start: int, end: int, tensors: Inputs, threads: object) -> Inputs:
        """Return the inputs."""
        return tensors


class StreamExecutor(ModelExecutor, Protocol):
    """Methods of an executor that measuring on streams needs in addition to serving."""

    device: StreamDevice
    cores: Sequence[int]
    """Cores of the host that the executor may use."""

    def load_shared(self, model: Runner, spec: LoadSpec) -> Loaded:
        """Like `load`, but the caller keeps the model and closes it."""

    def do(self, share: Share, work: Callable[[StreamLane], T]) -> T:
        """Run `work` with the streams of a share, on the thread of its lane, and return its result."""


class StreamTarget:
    """Streams of a device as a target: measured launches run through the executor that serves."""

    unit = "SM"

    def __init__(self, executor: StreamExecutor) -> None:
        self._executor = executor
        self.device = executor.device.name
        self.is_padded = not executor.device.why_no_graphs
        self.cores = tuple(executor.cores)
        """Cores of the host that the executor may use."""
        self._numbers = itertools.count(-1, -1)  # a server's launches, batches and queries count from 0 up

    def runs_inline(self, share: Share) -> bool:
        """False: launches run on the device."""
        return False

    def at(self, share: Share) -> AbstractContextManager[None]:
        """Do nothing: the thread of the lane submits launches."""
        return nullcontext()

    @contextmanager
    def ready(self, model: Runner, spec: LoadSpec) -> Iterator[Run]:
        """The model under a name of its own in the executor."""
        name = f"{model.name}, measured {next(self._numbers)}"
        loaded = self._executor.load_shared(model, spec)
        self._executor.add_model(name, loaded)
        try:
            yield partial(self._run, model, name, spec.max_batch > 1, {})
        finally:
            self._executor.remove_model(name)
            loaded.close()

    def unit_ns(self, model: Runner, inputs: Inputs, share: Share) -> tuple[int, ...]:
        """Median latency of each unit in ns, by the clock of the device."""
        torch_model: Any = model
        found: tuple[int, ...] = self._executor.do(share, lambda streams: torch_model.unit_ns(inputs, streams))
        return found

    def do(self, share: Share, work: Callable[[StreamLane], T]) -> T:
        """Run `work` with the streams of a share, on the thread of its lane, and return its result."""
        return self._executor.do(share, work)

    def floor_ns(self, share: Share) -> int:
        """Median latency in ns of sending one number to the device and back."""
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
