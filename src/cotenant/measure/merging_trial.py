"""The trial of merging: whether each row of a batch gets the outputs that it gets alone.

A model is merged if its graph proves that operators treat rows independently (`graph.rewrite`). Otherwise it is merged
if made-up rows, different in every datatype, give the same outputs alone and merged. All other models run with one
query in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.batches import row_buckets
from cotenant.execute.runner import Runner, to_numpy
from cotenant.graph.dfg import Tensor
from cotenant.measure.inputs import DeclaredShape, id_probes, make_rows
from cotenant.measure.samples import NO_SAMPLES, Samples
from cotenant.profiles.merging import SINGLE, Merging
from cotenant.work import CPU

Batching = Literal["proven", "exact", "trust"]
Rows = Mapping[str, Any]
"""Arrays by tensor, with one row or several along the first dimension."""

TOLERANCE = 1e-3
"""Relative to the largest finite magnitude of a row and output: other batch sizes use kernels that round otherwise."""
_TIE_UNITS = 32
"""Number of boundaries, from the end of the model, at which scores behind integers are compared."""
_SMALL, _ROUNDS = 100_000, 4
"""Models with at most `_SMALL` elements of a row times units are tried with `_ROUNDS` times as many rows."""
_EXACT_SIZES = 16
"""With `batching = "exact"` every batch size up to this one is tried, and powers of two above."""


def judge_merging(
    runner: Runner,
    shapes: Sequence[DeclaredShape],
    max_batch: int,
    batching: Batching = "proven",
    *,
    device: str = CPU,
    samples: Samples = NO_SAMPLES,
) -> Merging:
    """Whether batches of up to `max_batch` rows may be formed.

    Inputs named by `samples` have values from there only. An output that is declared to have one row, as some
    converters write, is tried. Raises ConfigError when the first dimension of an input or output is fixed otherwise.
    """
    if max_batch == 1:
        return SINGLE
    check_open(runner.name, runner, max_batch)
    if batching == "trust":
        return Merging("trusted", 'model.batching is "trust": no trial was made')
    why = _why_not_proven(runner, shapes)
    if not why and batching == "proven" and not any(map(has_one_row, runner.outputs)):
        return Merging("proven", "every operator of the graph treats every row by itself")
    fault = _Trial(runner, max_batch, batching == "exact", device, samples).fault(shapes)
    if fault:
        return Merging("refused", f"{fault} ({why})" if why else fault)
    alike = "bit-equal" if batching == "exact" else "equal"
    return Merging("tried", f"made-up rows gave {alike} answers alone and merged")


def is_same_answer(alone: Rows, merged: Rows, *, is_exact: bool = False) -> bool:
    """Whether the outputs of one query, run alone and in a batch, are equal within `TOLERANCE`.

    Shapes and datatypes must be equal, as must integers, flags and texts. Floats of a row may differ by `TOLERANCE`
    times its largest finite magnitude; infinities and NaN must be at the same positions. `is_exact` requires equal
    bits.
    """
    return alone.keys() == merged.keys() and all(
        _is_same(array, merged[name], is_exact) for name, array in alone.items()
    )


def _is_same(alone: Any, merged: Any, is_exact: bool) -> bool:
    if alone.shape != merged.shape or alone.dtype != merged.dtype:
        return False
    if is_exact and alone.dtype.kind not in "OU":
        return bool(alone.tobytes() == merged.tobytes())
    if alone.dtype.kind in "OUSbiu":
        return bool((alone == merged).all())
    if alone.ndim == 0 or alone.size == 0:
        rows = [(alone, merged)]
    else:
        rows = list(zip(alone, merged, strict=True))
    return all(_is_close(_wide(first), _wide(second)) for first, second in rows)


def _wide(array: Any) -> Any:
    """Floats as float64 or complex128: bfloat16 is no float for numpy, and differences of short floats overflow."""
    return np.asarray(array, np.complex128 if array.dtype.kind == "c" else np.float64)


def _is_close(alone: Any, merged: Any) -> bool:
    is_finite = np.isfinite(alone)
    if not np.array_equal(alone[~is_finite], merged[~is_finite], equal_nan=True):
        return False
    largest = np.abs(alone[is_finite]).max(initial=0.0)
    return bool((np.abs(alone[is_finite] - merged[is_finite]) <= TOLERANCE * largest).all())


def has_one_row(tensor: Tensor) -> bool:
    """Whether the file declares that the tensor has exactly one row."""
    return tensor.shape is not None and tensor.shape[:1] == (1,)


def check_open(model: str, runner: Runner, max_batch: int) -> None:
    """Raise ConfigError with all inputs and outputs that have a fixed first dimension, so that no batch fits."""
    outputs = [tensor for tensor in runner.outputs if not has_one_row(tensor)]
    faults = [
        f"model {model!r}: max_batch is {max_batch}, but the first dimension of {kind} {tensor.name!r} is fixed "
        f"(shape {list(tensor.shape)}): set max_batch = 1"
        for kind, tensors in (("input", runner.inputs), ("output", outputs))
        for tensor in tensors
        if tensor.shape is not None and (not tensor.shape or isinstance(tensor.shape[0], int))
    ]
    if faults:
        raise ConfigError(*faults)


def _why_not_proven(runner: Runner, shapes: Sequence[DeclaredShape]) -> str:
    """Why the graph does not prove that rows are independent, at one of the shapes; "" if it does."""
    if not hasattr(runner, "row_graph"):  # a format of another package
        return "its format has no information on rows"
    try:
        reasons = [runner.row_graph(shape).why_not(0, runner.unit_count) for shape in shapes]
    except Exception as error:  # for any file: the trial decides
        return f"its graph cannot be analysed: {error}"
    return next(filter(None, reasons), "")


class _Trial:
    """Runs rows alone and in batches, and reports differences."""

    def __init__(self, runner: Runner, max_batch: int, is_exact: bool, device: str, samples: Samples) -> None:
        self._runner = runner
        self._samples = samples
        self._is_exact = is_exact
        self._device = device
        self._count = runner.unit_count
        runner.prepare([(0, self._count)])
        exact = (*range(2, min(max_batch, _EXACT_SIZES) + 1), *row_buckets(max_batch)[1:])
        self._sizes = sorted({*exact} if is_exact else {2, max_batch})

    def fault(self, shapes: Sequence[DeclaredShape]) -> str:
        """The first difference, as a sentence; "" without one.

        All variants of rows are tried at the smallest shape, the first one that runs at each other shape.
        """
        by_size = sorted(shapes, key=_elements)
        is_varied = False
        for number, shape in enumerate(by_size):
            limits = self._id_limits(shape)
            is_small = _elements(shape) * self._count <= _SMALL
            rounds = _ROUNDS if is_small and not number else 1
            for rows in make_rows(self._runner.inputs, shape, limits, rounds, self._samples):
                answers = list(filter(None, map(self._alone, rows)))
                taken: Sequence[Rows] = [row for row, _ in answers]
                if len(taken) < 2:
                    continue  # the model refuses these values
                found = self._differs([answer for _, answer in answers], taken)
                if found:
                    return found
                is_varied |= any(not is_same_answer(first, second) for (_, first), (_, second) in pairwise(answers))
                if number:
                    break
        if not is_varied:
            return "all made-up rows gave the same outputs, so a trial proves nothing: give values by [samples.INPUT]"
        return ""

    def _alone(self, row: Rows) -> tuple[Rows, Rows] | None:
        """A row and its outputs; None if the model refuses the row."""
        try:
            return row, self._run(row)
        except Exception:  # the model may refuse made-up values with any exception
            return None

    def _run(self, tensors: Rows) -> dict[str, Any]:
        outputs = to_numpy(self._runner.run(0, self._count, tensors))
        return {name: np.array(array) for name, array in outputs.items()}

    def _id_limits(self, shape: DeclaredShape) -> dict[str, int]:
        """By input: the largest of a few integer limits that the model accepts."""
        return {
            name: next((limit for limit, row in probes if self._alone(row) is not None), 2)
            for name, probes in id_probes(self._runner.inputs, shape, self._device, self._samples)
        }

    def _differs(self, alone: Sequence[Rows], rows: Sequence[Rows]) -> str:
        if not is_same_answer(alone[0], again := self._run(rows[0]), is_exact=self._is_exact):
            name = next(name for name in again if not _is_same(alone[0][name], again[name], self._is_exact))
            return f"output {name!r} differs between two runs of the same row"
        for size in self._sizes:
            for pattern in _patterns(len(rows), size):
                batch = {name: np.concatenate([rows[at][name] for at in pattern]) for name in rows[0]}
                try:
                    merged = self._run(batch)
                except Exception as error:
                    reason = error.args[0] if isinstance(error, CotenantError) and error.args else error
                    return f"a batch of {size} rows fails where each row alone does not: {reason}"
                for at, row in enumerate(pattern):
                    if found := self._fault_of_row(alone[row], rows[row], merged, batch, at, size):
                        return found
        return ""

    def _fault_of_row(self, alone: Rows, row: Rows, merged: Rows, batch: Rows, at: int, size: int) -> str:
        for name, array in alone.items():
            whole = merged[name]
            for found, count in ((array, 1), (whole, size)):
                if found.ndim == 0 or len(found) != count:
                    have = "no rows" if found.ndim == 0 else f"{len(found)} rows"
                    return f"output {name!r} has {have} for {count} row{'s' * (count > 1)} of the inputs"
            if not _is_same(array, whole[at : at + 1], self._is_exact):
                is_float = array.dtype.kind not in "OUSbiu"
                if is_float or self._is_exact or not self._ties(row, merged, batch, at, size):
                    copies = self._run({each: np.concatenate([value] * size) for each, value in row.items()})
                    if _is_same(copies[name][at : at + 1], whole[at : at + 1], is_exact=True):
                        return f"output {name!r} of a row changes with the size of the batch, here {size}"
                    return f"output {name!r} of a row depends on the rows beside it in a batch of {size}"
        return ""

    def _ties(self, row: Rows, merged: Rows, batch: Rows, at: int, size: int) -> bool:
        """Whether integers differ because their scores tie within `TOLERANCE`.

        That holds if, at some boundary between units, the row's tensors are equal alone and merged within the
        tolerance. The rest of the model, run alone on the merged tensors, must then give the merged outputs.
        """
        mine = {name: array[at : at + 1] for name, array in merged.items()}
        for boundary in range(self._count - 1, max(0, self._count - 1 - _TIE_UNITS), -1):
            try:
                ranges = [(0, boundary), (boundary, self._count)]
                self._runner.prepare(ranges)
                before, beside = (to_numpy(self._runner.run(*ranges[0], tensors)) for tensors in (row, batch))
                if any(array.ndim == 0 or len(array) != size for array in beside.values()):
                    continue  # a tensor here has no rows
                part = {name: np.array(array[at : at + 1]) for name, array in beside.items()}
                if is_same_answer(before, part):
                    rest = to_numpy(self._runner.run(*ranges[1], part))
                    return is_same_answer(rest, mine)
            except Exception:
                continue
        return False


def _elements(shape: DeclaredShape) -> int:
    return sum(math.prod(dims) for dims in shape.values())


def _patterns(rows: int, size: int) -> Iterator[list[int]]:
    """Index of the row at each position of a batch: all rows cyclically, in two orders."""
    for start in range(0, rows, size):
        pattern = [(start + place) % rows for place in range(size)]
        yield pattern
        yield pattern[::-1]
