"""What every executor offers to a driver, those of real models to a server, and how their devices are divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt
from msgspec import Struct

from cotenant.config import DeviceSection
from cotenant.core.actions import Launch
from cotenant.core.events import Event
from cotenant.work import Machine, Share

if TYPE_CHECKING:
    from cotenant.execute.place import Place
    from cotenant.execute.runner import Runner

Tensors = Mapping[str, npt.NDArray[Any]]
Sessions = Sequence[tuple[int | tuple[int, ...], Sequence[tuple[int, int]]]]
"""What to load of a model: a number of threads, or cores, and the ranges of units to be run with them."""
Shapes = Mapping[str, Sequence[int]]
"""Full shape of each input."""


class Timing(Struct, frozen=True, gc=False):
    """Where the time of a launch went: gathering inputs, running units, splitting outputs."""

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


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

    def grow(self, launch: int, share: Share, on_grew: OnGrew) -> None:
        """Let a launch under way go on in this share from its next stop on, and say so there; never blocks.

        One that has no stop left, has just ended, or runs where shares cannot grow, goes on as it was.
        """

    def release(self, batch: int) -> None:
        """Forget the intermediate tensors of a batch."""

    def close(self) -> None:
        """Stop; waits for launches under way."""


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


class ModelExecutor(Executor, Protocol):
    """An executor of real models, as a server needs it. Nobody asks for its class: what it can do stands here."""

    on_event: Callable[[Event], None]
    """Is told what happens to tenants beside launches: they are suspended and resumed. Set before models are added."""

    @property
    def lanes_change(self) -> bool:
        """Whether other lanes can be had while it serves."""

    @property
    def place(self) -> Place:
        """Where its models are opened and measured, until `close`. Raises ConfigError where there is no such device."""

    def load(self, tenant: str, model: Runner, sessions: Sessions, memory_bytes: int | None = None) -> Loaded:
        """Load the sessions that launches of the tenant will need; waits. Raises ModelError.

        `memory_bytes` bounds the resident memory of what runs the model, where that is a process of its own.
        """

    def prepare(self, model: Loaded, sessions: Sessions, shapes: Shapes) -> None:
        """Load further sessions of a loaded model and run each once; waits. Raises ModelError."""

    def keep(self, model: Loaded, sessions: Sessions) -> None:
        """Let go of a model's other sessions."""

    def add_model(self, tenant: str, model: Loaded, *, urgent: bool = False) -> None:
        """Launches of this tenant run this model from now on, and go first if `urgent`, where the device knows that."""

    def announce(self, tenant: str) -> None:
        """The core knows the tenant now: what happened to it before is told again."""

    def remove_model(self, tenant: str) -> None:
        """Forget the model of a tenant; launches under way end normally."""

    def problem(self, tenant: str) -> str:
        """Why the tenant cannot be served at the moment, or ""."""

    def workers(self) -> list[WorkerStatus]:
        """The worker processes of the tenants that are served."""


class Layout(Protocol):
    """How a kind of device is divided."""

    def lanes(self, section: DeviceSection, cores: tuple[int, ...], where: str) -> tuple[Share, ...]:
        """The lanes that a configuration asks for; `cores` are those of a CPU. Raises ConfigError."""

    def machine(self, lanes: Sequence[Share], cores: tuple[int, ...]) -> Machine:
        """The machine whose slots these lanes, and those that may follow them, have."""
