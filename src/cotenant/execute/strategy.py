"""Run strategies: other ways to run the units of a model than its engine's, each registered by a package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from msgspec import UNSET, UnsetType

from cotenant import registry
from cotenant.execute.protocol import Followed, Shapes, TargetDevice
from cotenant.execute.runner import Runner
from cotenant.execute.threads.names import Threads
from cotenant.execute.threads.team import Team
from cotenant.graph.dfg import Dfg
from cotenant.graph.rewrite.rows import RowGraph
from cotenant.profiles.version_table import VersionTable
from cotenant.repository.formats import Arithmetic
from cotenant.repository.model_versions import ModelVersion
from cotenant.work import Share, TaskTime

if TYPE_CHECKING:
    from cotenant.execute.gpu.chains import Prepared
    from cotenant.execute.gpu.streams import Named, StreamLane


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file with the arguments of `execute.open_model.open_model`."""

    path: Path
    cache_dir: Path | None
    name: str
    device: str
    content: str
    arithmetic: Arithmetic


@dataclass(frozen=True, slots=True)
class VersionTrial:
    """What a strategy may measure of an opened version before it is served, and where.

    `graphs` is the `cache_dir` of the model. `shares` are those of a GPU that launches may use; of a CPU, all cores may
    be used. `inputs` makes the inputs of a declared shape with some rows.
    """

    found: ModelVersion
    graphs: Path
    shapes: Sequence[Shapes]
    target: TargetDevice
    shares: Sequence[Share]
    inputs: Callable[[Shapes, int], Mapping[str, Any]]


class WholeLaunch(Protocol):
    """One launch of a whole model on a stream by a strategy; has the methods of a `SegmentChain`."""

    rows: int

    def fill(self, start: int, values: Named) -> None:
        """Copy the inputs from the host; missing rows become 0. Raises TensorError."""

    def replay(self, start: int, end: int) -> Named:
        """Submit all units; returns the outputs, on the device or the host."""

    def times(self) -> tuple[TaskTime, ...]:
        """When each task ran. Call it after the launch has ended."""


class WholeRun(Protocol):
    """Runs launches of a whole model in one share of a GPU, one at a time, on the thread of its lane."""

    def launch(self, rows: int, captured: Any = None) -> WholeLaunch:
        """A launch of so many rows, or with the rows of `captured`, a result of `capture`."""

    def warm(self, inputs: Named, rows: int) -> WholeLaunch:
        """Run the model until the first-run costs are paid. Raises exceptions of the model."""

    def capture(self, inputs: Named, rows: int) -> Prepared:
        """Capture graphs for inputs of these shapes, if possible. Raises as `StreamLane.capture` and the model."""


class RunStrategy:
    """Base of run strategies: each method does nothing unless a subclass overrides it. A process has one object.

    A package joins by an entry point of the group `registry.RUN_STRATEGIES` that names a subclass. Every process that
    opens models imports it, so its module imports large libraries only where they are used.
    """

    def open(self, file: ModelFile, inner: Callable[[], Runner]) -> Runner:
        """Open a model to run in this way. Raises ModelError.

        `inner` opens it by the strategies before this one, the first of them by the engine of its format. A strategy
        wraps that model (`RunnerWrapper`), or opens the file itself. All processes that open the same `content` must
        get the same units.
        """
        return inner()

    def measures(self, found: ModelVersion) -> str:
        """What `choose` measures of a version, as text after "measuring"; "" where it is not to be called."""
        return ""

    def choose(self, model: Runner, trial: VersionTrial) -> Mapping[int, float]:
        """Measure in which shares the strategy gains, let the model follow it there, and note that in its `follows`.

        Returns by size of share: latency with the strategy over that of a plain run. A profile measures the model with
        what it follows.
        """
        return {}

    def follow(self, model: Runner, graphs: Path, chosen: Followed) -> None:
        """Let a model that another process opened again follow plans `chosen` before. `graphs`: its `cache_dir`."""

    def on_stream(self, model: Any, share: Share, lane: StreamLane, cores: Sequence[int]) -> WholeRun | None:
        """The runner of whole launches of a `StreamModel` in a share of a GPU, with `cores` of the host beside it.

        None where the model runs by its engine. Called on the thread of the lane, when the model is loaded.
        """
        return None

    def versions(
        self, model: Runner, shapes: Shapes, unit_ns: Sequence[int], whole_ns: Mapping[int, int]
    ) -> VersionTable | UnsetType:
        """Costs of the units in the versions that launches may select, for the profile of the model.

        `unit_ns` are times of the units on one core, `whole_ns` of the whole by numbers of cores, at `shapes`.
        """
        return UNSET


@cache
def strategies() -> Mapping[str, RunStrategy]:
    """All run strategies by name, in the order in which they open a model."""
    return {name: kind() for name, kind in registry.load_all(registry.RUN_STRATEGIES).items()}


def follows_of(model: Runner) -> dict[str, Followed]:
    """Plans that a model follows, by strategy; strategies without one are left out."""
    return dict(getattr(model, "follows", {}))


class RunnerWrapper:
    """A runner that delegates to another one, `inner`; a subclass overrides some methods.

    Attributes that are not here are those of `inner`, also ones that only its class has.
    """

    joins: bool
    if TYPE_CHECKING:

        def row_graph(self, shapes: Shapes) -> RowGraph:
            """Row graph of the inner model at these shapes of its inputs."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.path, self.name, self.graph_path, self.files = inner.path, inner.name, inner.graph_path, inner.files
        self.inputs, self.outputs, self.uncut_reason = inner.inputs, inner.outputs, inner.uncut_reason
        self.dfg: Dfg = inner.dfg
        self.unit_count, self.kernels = inner.unit_count, inner.kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def suggest_cuts(self, weights: Sequence[float], max_weight: float) -> tuple[int, ...]:
        """Cuts of the inner model."""
        return self.inner.suggest_cuts(weights, max_weight)

    def dfg_at(self, shapes: Shapes) -> Dfg:
        """Graph of the inner model at these shapes of its inputs."""
        return self.inner.dfg_at(shapes)

    def prepare(self, ranges: Iterable[tuple[int, int]], threads: Threads = 1) -> None:
        """Load sessions of the inner model for these ranges of units."""
        self.inner.prepare(ranges, threads)

    def keep(self, threads: Iterable[Threads]) -> None:
        """Unload sessions of the inner model for other threads than these."""
        self.inner.keep(threads)

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: Threads | Team = 1, version: int = 0
    ) -> dict[str, Any]:
        """Run units [start, end) of the inner model."""
        more = {"version": version} if version else {}
        return self.inner.run(start, end, tensors, threads, **more)

    def unit_ns(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Latency of each unit of the inner model in ns."""
        return self.inner.unit_ns(inputs)

    def close(self) -> None:
        """Unload the inner model."""
        self.inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
