"""Models of any format behind one surface: what profiling, serving and worker processes ask of a model, and arrays of
the tensors that it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from cotenant.execute.threads.names import Threads
from cotenant.execute.threads.team import Team
from cotenant.graph.dfg import Dfg, Tensor
from cotenant.graph.rewrite.rows import RowGraph

Pieces = Mapping[str, Sequence[Any]]
"""Arrays by tensor, which stand below each other along the first dimension; a single one stands for itself."""


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


def to_numpy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the results of any runner into numpy arrays."""
    if {type(value) for value in values.values()} == {np.ndarray}:
        return dict(values)
    if any(type(value).__module__.partition(".")[0] == "torch" for value in values.values()):
        from cotenant.execute.torch.arrays import to_numpy as from_torch

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


def joined(pieces: Sequence[Any]) -> Any:
    """One array of all rows; the array itself where there is one alone."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
