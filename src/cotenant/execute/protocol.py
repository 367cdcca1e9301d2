"""What every executor offers to a driver, those of real models to a server, and how their devices are divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
from msgspec import Struct

from cotenant.config import DeviceSection
from cotenant.core.actions import Launch
from cotenant.core.events import Event
from cotenant.execute.runner import Runner
from cotenant.repository.formats import Arithmetic
from cotenant.work import CPU, Machine, Share, TaskTime

MOST_ANSWER_BYTES = 2 << 30
"""Outputs of one launch, at most, where no lower limit is set."""
Tensors = Mapping[str, npt.NDArray[Any]]
Sessions = Sequence[tuple[int | tuple[int, ...], Sequence[tuple[int, int]]]]
"""What to load of a model: a number of threads, or cores, and the ranges of units to be run with them."""
Shapes = Mapping[str, Sequence[int]]
"""Full shape of each input."""
Followed = tuple[tuple[int, str], ...]
"""What a model follows by a run strategy: sizes of shares, each with the digest of what it follows there."""
Inputs = Mapping[str, Any]
Run = Callable[[Share, Inputs, Sequence[tuple[int, int]]], None]
"""Runs ranges of units in turn in a share, the first on these inputs, and waits for what comes out of the last."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was opened before, named by where its copies lie: what an executor loads without a look at it.

    The file was at `path`, its graph is in `folder` of a cache. `follows` is what it is to follow, by run strategy.
    """

    path: Path
    folder: Path
    name: str
    device: str = CPU
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    follows: Mapping[str, Followed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What has to be ready of a model before it is served: its segments between `cuts`, in these shares.

    `shapes` are the declared ones; `max_batch` rows are merged at most (1: never). `rows` are the sizes of batches that
    are prepared, by default powers of two up to the largest. `memory_bytes` bounds the resident memory of what runs the
    model, where that is a process of its own. Launches go first if `urgent`, where the device knows that.
    """

    shares: tuple[Share, ...]
    cuts: tuple[int, ...]
    shapes: tuple[Shapes, ...] = ()
    max_batch: int = 1
    memory_bytes: int | None = None
    urgent: bool = False
    rows: tuple[int, ...] = ()

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The units of the whole model, and of its segments."""
        return list(dict.fromkeys([(self.cuts[0], self.cuts[-1]), *pairwise(self.cuts)]))

    @property
    def sessions(self) -> Sessions:
        """What engines need of it that keep something for each number of threads, or set of cores."""
        threads = dict.fromkeys(share.cores if share.size > 1 else 1 for share in self.shares)
        return [(each, self.ranges) for each in threads]


class Timing(Struct, frozen=True, gc=False):
    """Where the time of a launch went: gathering inputs, running units, splitting outputs.

    `task_times` are those of a placed launch. `steal_ns` is how long, of the time that units ran, their
    thread was off its core; 0 where that is not known: for several cores, and on other devices than the CPU.
    `read_ns` is when the end was read from a worker, in monotonic time; 0 where there is none.
    """

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    task_times: tuple[TaskTime, ...] = ()
    steal_ns: int = 0
    read_ns: int = 0


OnEnd = Callable[[int, str | None, Timing], None]
"""Called once per launch with its number, the reason of a failure or None, and where the time went; from any thread."""


OnGrew = Callable[[int], None]
"""Called with the number of a launch that goes on in a larger share; from any thread."""


class Executor(Protocol):
    """Runs launches and keeps the tensors of queries and batches. Every method is thread-safe and quick."""

    def put(self, query: int, inputs: Tensors) -> None:
        """Keep the inputs of a query until it ends."""

    def take(self, query: int) -> Tensors:
        """Hand out the outputs of a query whose last unit has run, and forget the query."""

    def discard(self, query: int) -> None:
        """Forget a query that ended without an answer."""

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """Run a launch; never blocks."""

    def enqueue(self, launch: Launch) -> None:
        """This launch waits for others, all of which were started or enqueued before: see `core.actions.Enqueue`.

        May be ignored; never blocks.
        """

    def grow(self, launch: int, share: Share, on_grew: OnGrew) -> bool:
        """Let a launch under way go on in this share; never blocks. Says whether it does so already.

        Else it does from its next stop on, and calls `on_grew` there. One that has no stop left, has just ended, or
        runs where shares cannot grow, goes on as it was.
        """

    def release(self, batch: int) -> None:
        """Forget the intermediate tensors of a batch."""

    def close(self, until_s: float | None = None) -> None:
        """Stop; waits for launches under way, but not beyond `until_s`, in seconds of the monotonic clock."""


class Loaded(Protocol):
    """A model that an executor has loaded."""

    def close(self) -> None:
        """Let go of it; launches under way end normally."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The worker process of a tenant, for the metrics page. `restarts` counts the workers lost, by kind of loss.

    `start_ns` is the time that the last one took to come up, `load_ns` that to load its model then.
    """

    tenant: str
    pid: int
    resident_bytes: int
    start_ns: int = 0
    load_ns: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)


class TargetDevice(Protocol):
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


class Readers(Protocol):
    """A loop that looks after descriptors."""

    def add(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call whenever there is something to read, on the loop's thread. Returns when that is so."""

    def remove(self, descriptor: int) -> None:
        """Call no more. Returns when no call is under way, but for one that removes itself."""


class ModelExecutor(Executor, Protocol):
    """An executor of real models, as a server needs it. Nobody asks for its class: what it can do stands here."""

    on_event: Callable[[Event], None]
    """Is told what happens to tenants beside launches: they are suspended and resumed. Set before models are added."""

    readers: Readers | None
    """Where ends of launches are read, if they are read from descriptors. Set before models are loaded."""

    max_answer_bytes: int
    """Outputs of one launch, at most: one with more of them fails. Set before models are loaded."""

    @property
    def lanes_change(self) -> bool:
        """Whether other lanes can be had while it serves."""

    @property
    def target(self) -> TargetDevice:
        """Where its models are opened and measured, until `close`. Raises ConfigError where there is no such device."""

    def load(self, tenant: str, model: Runner | ModelSource, spec: LoadSpec) -> Loaded:
        """Load what launches of the tenant will need; waits. Takes an open model over. Raises ModelError."""

    def prepare(self, model: Loaded, spec: LoadSpec) -> None:
        """Load what a loaded model lacks of this, and run each once; waits. Raises ModelError."""

    def keep(self, model: Loaded, spec: LoadSpec) -> None:
        """Let go of what else was loaded of a model."""

    def add_model(self, tenant: str, model: Loaded) -> None:
        """Launches of this tenant run this model from now on."""

    def announce(self, tenant: str) -> None:
        """The core knows the tenant now: what happened to it before is told again."""

    def remove_model(self, tenant: str) -> None:
        """Forget the model of a tenant; launches under way end normally."""

    def cancel_loads(self) -> None:
        """End the loads under way, and load nothing more: the server stops. Never blocks for long."""

    def problem(self, tenant: str) -> str:
        """Why the tenant cannot be served at the moment, or ""."""

    def lasting_problem(self, tenant: str) -> str:
        """Why nothing will serve the tenant before it is loaded anew or its files change, or ""."""

    def workers(self) -> list[WorkerStatus]:
        """The worker processes of the tenants that are served."""

    def launch_counts(self) -> Mapping[str, int]:
        """Launches so far by how they ran, "captured" or "eager", where the device makes a difference."""


class Layout(Protocol):
    """How a kind of device is divided."""

    def lanes(self, section: DeviceSection, cores: tuple[int, ...], where: str) -> tuple[Share, ...]:
        """The lanes that a configuration asks for; `cores` are those of a CPU. Raises ConfigError."""

    def machine(self, lanes: Sequence[Share], cores: tuple[int, ...]) -> Machine:
        """The machine whose slots these lanes, and those that may follow them, have."""
