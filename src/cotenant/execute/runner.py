"""The protocol of models of any format, and conversion of their tensors to arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from cotenant.execute.threads.names import Threads
from cotenant.execute.threads.team import Team
from cotenant.graph.dfg import Dfg, Tensor
from cotenant.graph.rewrite.rows import RowGraph

RowChunks = Mapping[str, Sequence[Any]]
"""By tensor: arrays to be concatenated along the first dimension; a single array is the whole tensor."""


class Runner(Protocol):
    """A model that runs any contiguous range of its units; thread-safe. See `segments.SegmentedModel`."""

    path: Path
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    dfg: Dfg
    uncut_reason: str
    kernels: str
    """Digest of the compiled kernels that it uses; "" without any."""
    joins: bool
    """Whether cores may join a run under way."""

    @property
    def unit_count(self) -> int:
        """Number of units; boundaries are 0 to this number."""

    @property
    def graph_path(self) -> Path:
        """The file that is run. The name of its folder identifies the model's content and the engine's version."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Copies of the model's own files, its main file first. Nothing else of the model is ever loaded."""

    def suggest_cuts(self, weights: Sequence[float], max_weight: float) -> tuple[int, ...]:
        """Boundaries such that a segment weighs at most `max_weight`."""

    def dfg_at(self, shapes: Mapping[str, Sequence[int]]) -> Dfg:
        """The graph with its costs at the given input shapes."""

    def row_graph(self, shapes: Mapping[str, Sequence[int]]) -> RowGraph:
        """Row independence of units, at shapes with open first dimensions as rows; by rules of operators, without a
        run.
        """

    def prepare(self, ranges: Iterable[tuple[int, int]], threads: Threads = 1) -> None:
        """Load sessions for these ranges of units."""

    def keep(self, threads: Iterable[Threads]) -> None:
        """Unload sessions for other threads than these; runs under way end normally."""

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: Threads | Team = 1, version: int = 0
    ) -> dict[str, Any]:
        """Run units [start, end). Tensors are numpy arrays or the engine's own type; a `Team` only where it `joins`.

        Returns the tensors live at `end`, or all outputs of the model at the last unit. Later runs do not change them.
        `array_of` and `to_numpy` convert them.

        `version` selects the units' compiled kernels; units without that version run their own.

        Tensors that are live at `start` but not read by these units may be left out; the result lacks them then.
        """

    def unit_ns(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Latency of each unit on these inputs in ns, on one thread; at least 1 each.

        An engine without per-operator timing returns relative weights.
        """

    def close(self) -> None:
        """Unload the model; runs under way end normally."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def to_numpy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the results of any runner to numpy arrays."""
    if {type(value) for value in values.values()} == {np.ndarray}:
        return dict(values)
    if any(type(value).__module__.partition(".")[0] == "torch" for value in values.values()):
        from cotenant.execute.torch.arrays import to_numpy as from_torch

        return from_torch(values)
    return {name: array_of(value) for name, value in values.items()}


class _View:
    """Memory of a view, kept alive together with the tensor that gave the view."""

    __slots__ = ("__array_interface__", "owners")

    def __init__(self, view: Any, tensor: object) -> None:
        self.__array_interface__ = view.__array_interface__
        self.owners = view, tensor


def array_of(value: Any) -> Any:
    """A tensor of an engine as a numpy array; a value without a `numpy` method is returned as it is.

    The array keeps the tensor alive, hence its memory. An `OrtValue` over an array needs this: `OrtValue.numpy` returns
    a view that keeps neither the `OrtValue` nor that array alive.
    """
    if isinstance(value, np.ndarray) or not hasattr(value, "numpy"):
        return value
    array = value.numpy()
    return array if array.flags.owndata else np.asarray(_View(array, value))


def joined(chunks: Sequence[Any]) -> Any:
    """One array of all rows; a single chunk is returned as it is."""
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
