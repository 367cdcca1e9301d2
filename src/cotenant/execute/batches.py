"""Tensors of queries and batches: what executors of threads and of processes share."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cotenant.execute.errors import ModelError
from cotenant.execute.protocol import Tensors

Pieces = Mapping[str, Sequence[Any]]
"""Arrays by tensor, which stand below each other along the first dimension; a single one stands for itself."""

_REASON_CHARS = 300


class ModelGoneError(RuntimeError):
    """A launch names a model that was unloaded meanwhile."""

    def __init__(self, tenant: str) -> None:
        super().__init__(f"model of {tenant!r} is not loaded any more")


class QueryTensors:
    """Inputs of queries until they end, and outputs until they are taken. Thread-safe."""

    def __init__(self) -> None:
        self._inputs: dict[int, Tensors] = {}
        self._outputs: dict[int, Tensors] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._inputs) + len(self._outputs)

    def put(self, query: int, inputs: Tensors) -> None:
        """See Executor."""
        self._inputs[query] = inputs

    def take(self, query: int) -> Tensors:
        """See Executor."""
        with self._lock:
            self._inputs.pop(query, None)
            return self._outputs.pop(query)

    def discard(self, query: int) -> None:
        """See Executor."""
        with self._lock:
            self._inputs.pop(query, None)
            self._outputs.pop(query, None)

    def inputs(self, queries: Iterable[int]) -> list[Tensors]:
        """The inputs of some queries, in their order."""
        return [self._inputs[query] for query in queries]

    def keep(self, outputs: Mapping[int, Tensors]) -> None:
        """Keep outputs until they are taken; those of queries that have ended meanwhile nobody would take."""
        with self._lock:
            self._outputs.update({query: tensors for query, tensors in outputs.items() if query in self._inputs})


def pieces_of(inputs: Sequence[Tensors]) -> tuple[Pieces, tuple[int, ...]]:
    """The inputs of the queries of a batch, to be put below each other, and the rows of each; () for one query."""
    pieces = {name: [tensors[name] for tensors in inputs] for name in inputs[0]}
    return pieces, () if len(inputs) == 1 else tuple([len(next(iter(tensors.values()))) for tensors in inputs])


def joined(pieces: Sequence[Any]) -> Any:
    """One array of all rows; the array itself where there is one alone."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def scatter(queries: Sequence[int], rows: Sequence[int], outputs: Tensors) -> dict[int, Tensors]:
    """Give each query its rows of the outputs. Raises ValueError when an output has no row per input row."""
    if len(queries) == 1:
        return {queries[0]: outputs}
    total = sum(rows)
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != total:
            raise ValueError(f"output {name!r} has shape {array.shape}, expected {total} rows: set max_batch = 1")
    scattered: dict[int, Tensors] = {}
    at = 0
    for query, count in zip(queries, rows, strict=True):
        scattered[query] = {name: array[at : at + count] for name, array in outputs.items()}
        at += count
    return scattered


def for_engine(array: Any) -> Any:
    """BYTES tensors hold bytes on the wire and text in onnxruntime. Raises ValueError for what is no text."""
    if array.dtype.kind != "O":
        return array
    return np.array([_text(item) for item in array.ravel()], dtype=np.object_).reshape(array.shape)


def for_client(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs as they go to the front-ends: text becomes bytes again."""
    return {
        name: np.array([str(item).encode() for item in array.ravel()], dtype=np.object_).reshape(array.shape)
        if array.dtype.kind in "OU"
        else array
        for name, array in tensors.items()
    }


def reason_of(error: Exception) -> str:
    """A sentence for the client, without the paths of this machine."""
    text = error.reason if isinstance(error, ModelError) else str(error) or type(error).__name__
    return " ".join(text.split())[:_REASON_CHARS]


def _text(item: bytes | str) -> str:
    try:
        return item if isinstance(item, str) else item.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("an element of a BYTES input is not UTF-8 text, which this model takes") from None
