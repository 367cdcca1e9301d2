"""Models of any format behind one surface: what profiling, serving and worker processes ask of a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, Self

import numpy as np

from cotenant.execute.errors import ModelError
from cotenant.execute.threads.names import Threads
from cotenant.execute.threads.team import Team
from cotenant.graph.dfg import Dfg, Tensor
from cotenant.graph.rewrite.rows import RowGraph
from cotenant.repository.formats import Arithmetic, Format, formats
from cotenant.work import CPU


class Runner(Protocol):
    """A model that runs any contiguous range of its units; thread-safe. See `segments.SegmentedModel`."""

    path: Path
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    dfg: Dfg
    uncut_reason: str
    kernels: str
    """What was compiled for it and is used, by a digest; empty where nothing was."""
    joins: bool
    """Whether cores may join a run under way."""

    @property
    def unit_count(self) -> int:
        """Number of units; boundaries run from 0 to it."""

    @property
    def graph_path(self) -> Path:
        """What is run, in a folder whose name says what was opened, by which version of the engine."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Copies of the model's own files, its file first: nothing else is ever loaded of it."""

    def suggest_cuts(self, weights: Sequence[float], max_weight: float) -> tuple[int, ...]:
        """Boundaries such that segments weigh at most `max_weight`."""

    def dfg_at(self, shapes: Mapping[str, Sequence[int]]) -> Dfg:
        """The graph with its figures at the given input shapes."""

    def row_graph(self, shapes: Mapping[str, Sequence[int]]) -> RowGraph:
        """Which units treat every row by itself, at input shapes whose open first dimensions are rows: told by how
        operators treat the axes of their tensors, without a run."""

    def prepare(self, ranges: Iterable[tuple[int, int]], threads: Threads = 1) -> None:
        """Make ready to run these ranges of units."""

    def keep(self, threads: Iterable[Threads]) -> None:
        """Let go of what was made ready for other threads than these; runs under way end normally."""

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: Threads | Team = 1, version: int = 0
    ) -> dict[str, Any]:
        """Run units [start, end); the tensors are the engine's own, or numpy arrays. A team only where it `joins`.

        Gives the tensors live at `end`; at the last unit the model's outputs, constant ones among them. They stay as
        they are whatever runs later. `array_of` and `to_numpy` make arrays of them.

        `version` is that of the units' compiled kernels; units that have fewer of them, or none, run as they can.

        Those that are live at `start` but not read by these units may be left out; what is returned lacks them then.
        """

    def unit_ns(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Latency of each unit on these inputs in ns, one thread; at least 1 each.

        Where the engine keeps no account of operators, what they are believed to weigh against each other will do.
        """

    def close(self) -> None:
        """Let go of it; runs under way end normally."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def engine_of(path: Path) -> Format:
    """The format of the file, which names the engine that runs it. Raises ModelError for a suffix that none has."""
    known = formats()
    found = known.get(path.suffix)
    if found is None:
        raise ModelError(path, f"no engine runs files that end in {path.suffix!r}", f"Give one of {', '.join(known)}")
    return found


def open_model(
    path: Path,
    *,
    cache_dir: Path | None = None,
    name: str = "",
    device: str = CPU,
    content: str = "",
    arithmetic: Arithmetic = Arithmetic(),
) -> Runner:
    """Open the model file at `path` on the CPU, or on "cuda:N", with the engine of its format.

    `name` is for messages, by default the file's stem; `cache_dir` is where copies of its files, and what the engine
    prepares, are kept. `content` is "", or the name of the folder in there that an earlier opening gave (`graph_path`):
    that is opened, whatever lies at `path` by now.

    Raises ModelError when the file cannot be read or run, is not the one with that `content`, its engine is not
    installed, or knows nothing of such an `arithmetic`.
    """
    engine = engine_of(path)
    if importlib.util.find_spec(engine.package) is None:
        raise ModelError(path, f"it needs {engine.package}, which is not installed", f"Run: {engine.install}")
    if device.partition(":")[0] not in engine.devices:
        others = [each.suffix for each in formats().values() if device.partition(":")[0] in each.devices]
        raise ModelError(
            path,
            f"{engine.package} runs it on {' and '.join(engine.devices)} alone",
            f"Export it as {' or '.join(others)} for {device}" if others else f"Nothing runs on {device}",
        )
    is_exact = arithmetic.precision in ("fp32", "tf32")
    if not engine.has_arithmetic and not (is_exact and not arithmetic.lays_out):
        which = "channels_last is true" if is_exact else f"precision is {arithmetic.precision!r}"
        suffixes = " or ".join(each.suffix for each in formats().values() if each.has_arithmetic)
        raise ModelError(
            path, f"{which}, and {engine.package} runs it as it is", f"Leave that out, or export it as {suffixes}"
        )
    more = {"arithmetic": arithmetic} if engine.has_arithmetic else {}
    opener = resolve_name(engine.opener)
    made: Runner = opener(path, cache_dir=cache_dir, name=name, device=device, content=content, **more)
    return made


def to_numpy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the results of any runner into numpy arrays."""
    if {type(value) for value in values.values()} == {np.ndarray}:
        return dict(values)
    if any(type(value).__module__.partition(".")[0] == "torch" for value in values.values()):
        from cotenant.execute.torch.model import to_numpy as from_torch

        return from_torch(values)
    return {name: array_of(value) for name, value in values.items()}


class _Lent:
    """Memory of a view, which lives as long as the view and the tensor that gave it."""

    __slots__ = ("__array_interface__", "owners")

    def __init__(self, view: Any, tensor: object) -> None:
        self.__array_interface__ = view.__array_interface__
        self.owners = view, tensor


def array_of(value: Any) -> Any:
    """A tensor of an engine as a numpy array; whatever has no `numpy` is given back as it is.

    The array holds the tensor, hence its memory. An `OrtValue` over an array needs this: `OrtValue.numpy` gives a view
    that holds neither the `OrtValue` nor that array.
    """
    if isinstance(value, np.ndarray) or not hasattr(value, "numpy"):
        return value
    array = value.numpy()
    return array if array.flags.owndata else np.asarray(_Lent(array, value))
