"""Protocols: executors for a driver, executors of real models for a server, and layouts of devices."""

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
"""Default limit of the outputs of one launch, in bytes."""
Tensors = Mapping[str, npt.NDArray[Any]]
Sessions = Sequence[tuple[int | tuple[int, ...], Sequence[tuple[int, int]]]]
"""What to load of a model: threads (a number or cores), each with the ranges of units that they run."""
Shapes = Mapping[str, Sequence[int]]
"""Full shape of each input."""
Followed = tuple[tuple[int, str], ...]
"""Plans that a model follows by a run strategy: pairs of the size of a share and the digest of the plan there."""
Inputs = Mapping[str, Any]
Run = Callable[[Share, Inputs, Sequence[tuple[int, int]]], None]
"""Runs ranges of units one after another in a share, the first on these inputs, and waits for the last outputs."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was opened before, by the place of its copies: an executor can load it without opening it first.

    The file was at `path`; its graph is in `folder` of a cache. `follows` are its plans, by run strategy.
    """

    path: Path
    folder: Path
    name: str
    device: str = CPU
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    follows: Mapping[str, Followed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Parts of a model to load before it is served: its segments between `cuts`, in these shares.

    `shapes` are the declared ones; `max_batch` is the largest batch (1: queries are not merged). `rows` are the batch
    sizes to prepare, by default `row_buckets`. `memory_bytes` limits the resident memory of the model's worker process,
    if it has one. Launches of `urgent` models have priority where the device supports it.
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
        """Units of the whole model, and of each segment."""
        return list(dict.fromkeys([(self.cuts[0], self.cuts[-1]), *pairwise(self.cuts)]))

    @property
    def sessions(self) -> Sessions:
        """Sessions to load, for engines that keep one for each number of threads or set of cores."""
        threads = dict.fromkeys(share.cores if share.size > 1 else 1 for share in self.shares)
        return [(each, self.ranges) for each in threads]


class Timing(Struct, frozen=True, gc=False):
    """Where the time of a launch went, in ns: gathering inputs, running units, splitting outputs.

    `task_times` are the tasks of a launch that ran by a placement. `steal_ns` is the time during the units when their
    thread was off its core; 0 if unknown (several cores, GPUs). `read_ns` is when the end was read from a worker, in
    monotonic time; 0 without one.
    """

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    task_times: tuple[TaskTime, ...] = ()
    steal_ns: int = 0
    read_ns: int = 0


OnEnd = Callable[[int, str | None, Timing], None]
"""Called once for each launch, from any thread: its number, the reason of a failure or None, and its timing."""


OnExpanded = Callable[[int], None]
"""Called with the number of a launch that goes on in a larger share; from any thread."""


class Executor(Protocol):
    """Runs launches, and keeps the tensors of queries and batches. Every method is thread-safe and quick."""

    def put(self, query: int, inputs: Tensors) -> None:
        """Keep the inputs of a query until it ends."""

    def take(self, query: int) -> Tensors:
        """Return the outputs of a query after its last unit, and forget the query."""

    def discard(self, query: int) -> None:
        """Forget a query that ended without outputs."""

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """Run a launch; never blocks."""

    def enqueue(self, launch: Launch) -> None:
        """Announce a launch that waits for others, all started or enqueued before. See `core.actions.Enqueue`.

        May be ignored; never blocks.
        """

    def expand(self, launch: int, share: Share, on_expanded: OnExpanded) -> bool:
        """Expand a launch under way to this share; never blocks. Returns whether it has the share already.

        Else the launch takes it over at its next stop, and `on_expanded` is called. The launch keeps its share if it
        has no stop left, has just ended, or the executor cannot expand launches.
        """

    def release(self, batch: int) -> None:
        """Forget the intermediate tensors of a batch."""

    def close(self, until_s: float | None = None) -> None:
        """Stop. Waits for launches under way, at most until `until_s` of the monotonic clock (seconds)."""


class Loaded(Protocol):
    """A model loaded by an executor."""

    def close(self) -> None:
        """Unload it. Launches under way end normally."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The worker process of a tenant, for the metrics page. `restarts` counts lost workers by the kind of loss.

    `start_ns` is the time from the start of the process to the loaded model, `load_ns` the part that loads the model.
    `cpu_s` is the processor time that it has used, in seconds.
    """

    tenant: str
    pid: int
    resident_bytes: int
    start_ns: int = 0
    load_ns: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0


class TargetDevice(Protocol):
    """A device on which models are opened and measured."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""

    @property
    def unit(self) -> str:
        """Name of one slot of a share in messages."""

    @property
    def is_padded(self) -> bool:
        """Whether a batch runs with the rows of the next larger measured batch."""

    def runs_inline(self, share: Share) -> bool:
        """Whether launches in this share run on the calling thread alone: its processor time is then theirs."""

    def at(self, share: Share) -> AbstractContextManager[None]:
        """Inside, runs of the calling thread use this share."""

    def ready(self, model: Runner, spec: LoadSpec) -> AbstractContextManager[Run]:
        """The model, loaded as it is served, while the context lasts. Raises ModelError when it cannot be loaded."""

    def unit_ns(self, model: Runner, inputs: Inputs, share: Share) -> tuple[int, ...]:
        """Median latency of each unit in ns, run one by one."""

    def floor_ns(self, share: Share) -> int:
        """Median latency in ns of a launch without work; 0 where launches do not wait for a device."""


class Readers(Protocol):
    """An event loop that watches file descriptors."""

    def add(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call `call` on the loop's thread whenever `descriptor` can be read. Returns when the loop watches it."""

    def remove(self, descriptor: int) -> None:
        """Stop watching. Returns when no call is under way, except a call that removes its own descriptor."""


class WorkerStarter(Protocol):
    """Starts worker processes that are no children of this process. A worker is as `worker.process.WorkerProcess`."""

    def start(self, tenant: str, nice: int) -> Any:
        """Start a worker process. Raises OSError."""

    def expect(self, tenant: str, nice: int, suffix: str) -> None:
        """Start a worker for the next `start` of the tenant, which may import what such files need. Raises OSError."""

    def forget(self, tenant: str) -> None:
        """End the worker of `expect` that no `start` has taken."""

    def adopt(self, tenant: str) -> Any:
        """A worker that an engine before this one left behind; None where there is none any more."""


class ModelExecutor(Executor, Protocol):
    """An executor of real models for a server. The server knows no classes of executors, only this protocol."""

    on_event: Callable[[Event], None]
    """Receives events of tenants other than ends of launches: suspended, resumed. Set before models are added."""

    readers: Readers | None
    """The loop that reads ends of launches, if they come over descriptors. Set before models are loaded."""

    starter: WorkerStarter | None
    """Starts its worker processes, where they outlive this process. Set before models are loaded."""

    max_answer_bytes: int
    """Largest size of the outputs of one launch in bytes; a larger launch fails. Set before models are loaded."""

    @property
    def has_parallel_loads(self) -> bool:
        """Whether `load` may run on several threads at once, beside all other methods."""

    def expecting(self, tenant: str, suffix: str) -> AbstractContextManager[None]:
        """A block in which a model of the tenant, from a file that ends in `suffix`, is going to be loaded."""

    @property
    def lanes_change(self) -> bool:
        """Whether launches may use new lanes while it serves."""

    @property
    def target(self) -> TargetDevice:
        """The device on which its models are opened and measured, until `close`. Raises ConfigError without it."""

    def load(self, tenant: str, model: Runner | ModelSource, spec: LoadSpec) -> Loaded:
        """Load the model for launches of the tenant; blocks. Takes ownership of an open model. Raises ModelError."""

    def prepare(self, model: Loaded, spec: LoadSpec) -> None:
        """Load what a loaded model lacks of `spec`, and run it once; blocks. Raises ModelError."""

    def keep(self, model: Loaded, spec: LoadSpec) -> None:
        """Unload everything of a model that is not in `spec`."""

    def add_model(self, tenant: str, model: Loaded) -> None:
        """Let launches of this tenant run this model from now on."""

    def announce(self, tenant: str) -> None:
        """The core knows the tenant from now on: report its present state again."""

    def remove_model(self, tenant: str) -> None:
        """Forget the model of a tenant; launches under way end normally."""

    def cancel_loads(self) -> None:
        """End the loads under way and refuse new ones, for the stop of the server. Never blocks for long."""

    def problem(self, tenant: str) -> str:
        """Why the tenant cannot be served at the moment, or ""."""

    def lasting_problem(self, tenant: str) -> str:
        """Why the tenant cannot be served until it is loaded again or its files change, or ""."""

    def workers(self) -> list[WorkerStatus]:
        """Worker processes of the tenants that are served."""

    def launch_counts(self) -> Mapping[str, int]:
        """Launches so far, "captured" and "eager"; {} where the device does not distinguish them."""


class Layout(Protocol):
    """How a kind of device is divided into lanes."""

    def lanes(self, section: DeviceSection, cores: tuple[int, ...], where: str) -> tuple[Share, ...]:
        """The lanes of a configuration; `cores` are those of a CPU. Raises ConfigError."""

    def machine(self, lanes: Sequence[Share], cores: tuple[int, ...]) -> Machine:
        """The machine with the slots of these lanes, and of lanes that may replace them."""
