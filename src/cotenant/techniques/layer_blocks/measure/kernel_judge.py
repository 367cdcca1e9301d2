"""Validation of compiled kernels: a model's answers compared with onnxruntime's, NaN and infinities included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from cotenant.execute.errors import ModelError
from cotenant.execute.onnx.segment_session import load_session, session_options
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy
from cotenant.measure.inputs import DeclaredShape, make_inputs
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel

Values = Mapping[str, Any]
DIFFERS = float("inf")
"""The error of an answer that differs by more than rounding."""
_SEED = 1


def judged_error(compiled: CompiledModel, plain: SegmentedModel, shape: DeclaredShape) -> float:
    """Largest relative error of the answers on kernels at one declared shape; `DIFFERS` for different answers.

    The trials are the whole; other rows, if rows are open; a cut among units on kernels; inputs with NaN and
    infinities. Tensors at the cut are in place, then arrays. A trial that onnxruntime refuses does not count.
    """
    error = 0.0
    is_open = all(tensor.shape is not None and tensor.shape[:1] == (None,) for tensor in plain.inputs)
    most = max((dims[0] for dims in shape.values() if dims), default=1)
    for rows in (0, 3 if most == 2 else 2) if is_open else (0,):
        inputs = make_inputs(plain.inputs, shape, max(1, rows), bool(rows))
        with suppress(ModelError):
            right = plain.run(0, plain.unit_count, inputs)
            for answer in _answers(compiled, inputs):
                error = max(error, error_of(answer, right))
    values, is_more = special_values(compiled, shape)
    exact = load_session(plain.path, plain.files[0], session_options(1, optimise=False))
    for value in values:
        inputs = _with_special(make_inputs(plain.inputs, shape, 1, False), value)
        with suppress(ModelError):
            plain_right = to_numpy(plain.run(0, plain.unit_count, inputs))
            names = list(plain_right)
            exact_right = dict(zip(names, exact.run(names, dict(inputs)), strict=True))
            for answer in _answers(compiled, inputs):
                if not _is_special_alike(to_numpy(answer), exact_right, plain_right, is_more=is_more):
                    return DIFFERS
    return error


def special_values(compiled: CompiledModel, shapes: Mapping[str, Sequence[int]]) -> tuple[tuple[float, ...], bool]:
    """Values for which a model can be compared with onnxruntime, and whether NaN may then be in more places.

    onnxruntime's MaxPool forgets a NaN unless it is last, and some give the lowest number for negative infinity.
    """
    operators, ours = compiled.dfg.operators, compiled.prepared(shapes).plan.ours
    pools = {
        is_ours
        for unit, is_ours in zip(compiled.dfg.units, ours, strict=True)
        if any(operators[at].op_type == "MaxPool" for at in unit.operators)
    }
    return () if False in pools else (np.nan,) if pools else (np.nan, np.inf, -np.inf), bool(pools)


def error_of(got: Values, right: Values) -> float:
    """Largest difference over the largest finite magnitude of its output. `DIFFERS` if shapes, types, texts, integers,
    NaN or infinities differ."""
    error, given = 0.0, to_numpy(got)
    for name, expected in to_numpy(right).items():
        array, expected = np.asarray(given[name]), np.asarray(expected)
        if array.shape != expected.shape or array.dtype != expected.dtype:
            return DIFFERS
        if expected.dtype.kind != "f":
            if not np.array_equal(array, expected):
                return DIFFERS
            continue
        is_number = np.isfinite(expected)
        if not np.array_equal(_kind(array), _kind(expected)):
            return DIFFERS
        if is_number.any():
            numbers = expected[is_number].astype(np.float64)
            error = max(error, float(np.abs(array[is_number] - numbers).max() / max(1e-30, np.abs(numbers).max())))
    return error


def _answers(compiled: CompiledModel, inputs: Values) -> Iterator[Values]:
    """Answers of the whole, of a cut in the middle of the units on kernels, and of that cut with arrays."""
    end = compiled.unit_count
    yield compiled.run(0, end, inputs)
    ours = compiled.prepared({name: np.shape(value) for name, value in inputs.items()}).plan.ours
    inner = [at for at in range(1, end) if ours[at]]
    if inner:
        cut = inner[len(inner) // 2]
        yield compiled.run(cut, end, compiled.run(0, cut, inputs))
        live = to_numpy(compiled.run(0, cut, inputs))
        yield compiled.run(cut, end, live)


def _with_special(inputs: Values, value: float) -> dict[str, Any]:
    """Inputs with this value at one position of each row of each tensor of floats."""
    rng = np.random.default_rng(_SEED)
    made = dict(inputs)
    for name, array in inputs.items():
        if array.dtype.kind == "f" and array.size:
            rows = array.copy().reshape(array.shape[0] if array.ndim else 1, -1)
            rows[:, rng.integers(rows.shape[1])] = value
            made[name] = rows.reshape(array.shape)
    return made


def _is_special_alike(got: Values, exact: Values, plain: Values, *, is_more: bool) -> bool:
    """Whether NaN and infinities are as in onnxruntime with or without its optimiser; its layouts make NaN of
    infinities. `is_more`: NaN may be in more places."""
    for name, right in exact.items():
        if right.dtype.kind != "f":
            continue
        if got[name].shape != right.shape:
            return False
        kind = _kind(got[name])
        is_alike = (kind == _kind(right)) | (kind == _kind(plain[name])) | (is_more & np.isnan(got[name]))
        if not is_alike.all():
            return False
    return True


def _kind(array: Any) -> Any:
    """0 for numbers, 1 and -1 for infinities, 2 for NaN."""
    return np.where(np.isnan(array), 2, np.sign(array) * np.isinf(array))
