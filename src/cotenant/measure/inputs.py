"""Synthetic inputs of a model at a declared shape, for measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cotenant.errors import ConfigError
from cotenant.files import toml_text
from cotenant.graph.datatypes import numpy_type
from cotenant.graph.dfg import Tensor
from cotenant.measure.samples import NO_SAMPLES, Samples
from cotenant.work import CPU

DeclaredShape = Mapping[str, Sequence[int]]
_CHANNELS = (1, 3, 4)


def check_shapes(model: str, inputs: Sequence[Tensor], shapes: Sequence[DeclaredShape]) -> tuple[DeclaredShape, ...]:
    """Shapes to profile at: the declared ones, or the model's own if only its first dimension is open.

    Raises ConfigError with all problems when a declared shape names an unknown input or does not fit, or when a shape
    must be declared.
    """
    known = {tensor.name: tensor for tensor in inputs}
    faults: list[str] = []
    for shape in shapes:
        for name, dims in shape.items():
            if name not in known:
                faults.append(
                    f"model {model!r}: [[model.shapes]] names input {name!r}; it has {', '.join(known)}: rename it"
                )
            elif (declared := known[name].shape) is not None and not _fits(dims, declared):
                faults.append(
                    f"model {model!r}: [[model.shapes]] gives {name!r} the shape {list(dims)}, "
                    f"the model takes {[dim if isinstance(dim, int) else -1 for dim in declared]}"
                )
    complete = []
    for shape in shapes or ({},):
        missing = [tensor for tensor in inputs if tensor.name not in shape and not _is_closed(tensor)]
        if missing:
            names = " and ".join(repr(tensor.name) for tensor in missing)
            what = f"shape of input {names} is" if len(missing) == 1 else f"shapes of inputs {names} are"
            where = "to its [[model.shapes]]" if shape else "at the end of its config.toml"
            lines = toml_text({tensor.name: closed_shape(tensor) for tensor in missing}).rstrip()
            header = "" if shape else "[[model.shapes]]\n"
            faults.append(
                f"model {model!r}: the {what} open; add these lines {where}, with the sizes that clients send:\n"
                f"{header}{lines}"
            )
        else:
            complete.append({tensor.name: shape.get(tensor.name) or _closed(tensor) for tensor in inputs})
    if faults:
        raise ConfigError(*faults)
    return tuple(complete)


def closed_shape(tensor: Tensor, side: int = 224, length: int = 128) -> tuple[int, ...]:
    """A shape of one row: `side` for open dimensions of images, `length` for those of other inputs."""
    dims = tensor.shape or (1,)
    is_image = len(dims) == 4 and (dims[1] in _CHANNELS or dims[3] in _CHANNELS) and tensor.dtype != "tensor(string)"
    first = dims[0] if isinstance(dims[0], int) else 1
    return first, *(dim if isinstance(dim, int) else side if is_image else length for dim in dims[1:])


def make_inputs(
    inputs: Sequence[Tensor], shape: DeclaredShape, items: int, batched: bool, samples: Samples = NO_SAMPLES
) -> dict[str, Any]:
    """Inputs of `items` rows: values of `samples`, else numbers around 0, ones, and short texts of known words.

    Deterministic.
    """
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {}
    for tensor in inputs:
        dims = tuple(shape[tensor.name])
        dims = (items, *dims[1:]) if batched and dims else dims
        dtype = numpy_type(tensor.dtype) or np.dtype(np.float32)
        given = samples.draw(tensor.name, dtype, dims, rng)
        if given is not None:
            made[tensor.name] = given
        elif tensor.dtype == "tensor(bfloat16)" or dtype.kind == "f":
            made[tensor.name] = rng.standard_normal(dims).astype(dtype)
        elif dtype.kind == "U":
            texts = samples.texts(dims, rng)
            made[tensor.name] = np.full(dims, "text", dtype=np.object_) if texts is None else texts
        else:
            made[tensor.name] = np.ones(dims, dtype)
    return made


ROWS = 4
"""Rows of a trial, made by `make_rows`."""
_PARTS = (1.0, 0.5, 0.25, 0.75)
"""Share of the second axis that is not padding, by row, in the second and third variant."""
_SCALES = (1.0, 100.0, 0.01, 1e4)
_LARGEST_IDS = (30_000, 1_000, 100, 10, 2, 1)
_WORDS = ("text", "", "a longer one, of 7 words", "Zürich")
_NUMBERS = ("1", "-2.5", "100", "0")


def make_rows(
    inputs: Sequence[Tensor],
    shape: DeclaredShape,
    limits: Mapping[str, int],
    rounds: int = 1,
    samples: Samples = NO_SAMPLES,
) -> Iterator[list[dict[str, Any]]]:
    """Variants of `ROWS` rows that differ from each other in every datatype, for the trial of merging.

    1. Numbers around 0 with magnitudes by factors of 100, random integers and flags, texts (of words that the model
       knows, if `samples` has any).
    2. Numbers below 0, above 0, all 0 and very large; ones up to a length of the row's own, then zeros.
    3. Numbers from 0 to 1 with zeros after a length; integers of the first input, with such masks in all others.
    4. As the first, with zeros after a length.

    Inputs named by `samples` have its values in all variants. `limits` has, by input, an exclusive upper bound of
    integers. Each further round draws new values.
    """
    rng = np.random.default_rng(0)
    longest = max((dim for dims in shape.values() for dim in dims[1:]), default=1)
    for variant in [*range(4)] * rounds:
        rows: list[dict[str, Any]] = [{} for _ in range(ROWS)]
        has_ids = False
        for tensor in inputs:
            dims = (1, *tuple(shape[tensor.name])[1:])
            dtype = numpy_type(tensor.dtype) or np.dtype(np.float32)
            limit = limits.get(tensor.name, 2)
            are_ids = dtype.kind in "iu" and (variant in (0, 3) or (variant == 2 and not has_ids))
            given = samples.draw(tensor.name, dtype, (ROWS, *dims[1:]), rng)
            if given is not None:
                for row, made in enumerate(rows):
                    made[tensor.name] = given[row : row + 1]
                continue
            has_ids |= are_ids
            for row, made in enumerate(rows):
                mask = _mask(dims, _PARTS[row])
                if dtype.kind == "U":
                    texts = (_WORDS, _NUMBERS, ["x" * round(part * 100) for part in _PARTS], _WORDS[::-1])[variant]
                    known = samples.texts(dims, rng) if variant in (0, 3) else None
                    made[tensor.name] = np.full(dims, texts[row], dtype=np.object_) if known is None else known
                elif dtype.kind == "b":
                    flags = rng.integers(0, 2, dims)
                    made[tensor.name] = (flags if variant == 0 else mask if variant < 3 else flags * mask).astype(dtype)
                elif are_ids:
                    ids = rng.integers(0, limit if row != 2 else min(limit, 2), dims)
                    made[tensor.name] = (ids * mask if variant else ids).astype(dtype)
                elif dtype.kind in "iu":
                    length = max(1, round(_PARTS[row] * longest)) if mask.size == 1 else mask
                    made[tensor.name] = np.broadcast_to(np.minimum(length, limit - 1), dims).astype(dtype)
                else:
                    made[tensor.name] = _numbers(rng, dims, variant, row, mask).astype(dtype)
        yield rows


def _numbers(rng: np.random.Generator, dims: tuple[int, ...], variant: int, row: int, mask: Any) -> Any:
    normal = rng.standard_normal(dims)
    if variant == 0:
        return normal * _SCALES[row]
    if variant == 1:
        return (-np.abs(normal), np.abs(normal), 0 * normal, 1e6 * normal)[row]
    return (rng.random(dims) if variant == 2 else normal * _SCALES[row]) * mask


def _mask(dims: tuple[int, ...], part: float) -> Any:
    """Ones up to a share of the second axis, then zeros."""
    if len(dims) == 1:
        return np.ones(dims, np.int64)
    mask = np.zeros(dims, np.int64)
    mask[:, : max(1, round(part * dims[1]))] = 1
    return mask


def id_probes(
    inputs: Sequence[Tensor], shape: DeclaredShape, device: str, samples: Samples = NO_SAMPLES
) -> Iterator[tuple[str, Iterator[tuple[int, dict[str, Any]]]]]:
    """Rows that find the largest allowed integers: by input, limits in descending order, each with a row to run.

    On a GPU only two values are probed: an index that is too large ends the whole context there.
    """
    for tensor in inputs:
        dtype = numpy_type(tensor.dtype)
        if dtype is not None and dtype.kind in "iu" and tensor.name not in samples:
            largest = [each for each in _LARGEST_IDS if each - 1 <= np.iinfo(dtype).max]
            yield tensor.name, _probes(inputs, shape, tensor.name, largest if device == CPU else [2, 1], samples)


def _probes(
    inputs: Sequence[Tensor], shape: DeclaredShape, name: str, limits: Sequence[int], samples: Samples
) -> Iterator[tuple[int, dict[str, Any]]]:
    for limit in limits:
        for others in (0, 1):
            row = make_inputs(inputs, shape, 1, True, samples)
            for each, array in row.items():
                if array.dtype.kind in "iu" and each not in samples:
                    row[each] = np.full_like(array, limit - 1 if each == name else others)
            yield limit, row


def _fits(dims: Sequence[int], declared: Sequence[object]) -> bool:
    return len(dims) == len(declared) and all(
        not isinstance(known, int) or known == dim for dim, known in zip(dims, declared, strict=True)
    )


def _is_closed(tensor: Tensor) -> bool:
    return tensor.shape is not None and all(isinstance(dim, int) for dim in tensor.shape[1:])


def _closed(tensor: Tensor) -> list[int]:
    return [dim if isinstance(dim, int) else 1 for dim in tensor.shape or ()]
