"""A first configuration of a model from its file alone: input shapes that run, and the largest batch to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from cotenant.errors import ConfigError
from cotenant.execute.errors import ModelError
from cotenant.execute.runner import Runner
from cotenant.graph.dfg import Tensor
from cotenant.measure.inputs import closed_shape, make_inputs
from cotenant.repository import ModelVersion

MAX_BATCH = 8
"""Rows that are merged at most where the first dimension of every input is open."""
_IMAGE_SIDES = (224, 320, 640, 256, 64, 48, 32, 512)
"""Height and width to try, in pixels: those of common classifiers and detectors first."""
_LENGTHS = (128, 64, 16, 1, 512, 16_000)
"""Sizes of other open dimensions to try: tokens, columns, samples of sound."""


def drafted(found: ModelVersion, runner: Runner) -> ModelVersion:
    """A version with `model.shapes` and `model.max_batch` filled in, as far as its configuration leaves them out.

    Shapes of open inputs are the first of `candidate_shapes` at which the opened model runs. Raises ModelError where it
    runs at none of them, and ConfigError where the rank of an input is unknown.
    """
    config = found.config.model
    shapes = config.shapes or _shapes(runner)
    rows = config.max_batch if config.max_batch > 1 else max_batch_of(runner.inputs)
    model = structs.replace(config, shapes=shapes, max_batch=rows)
    return replace(found, config=structs.replace(found.config, model=model))


def max_batch_of(inputs: Sequence[Tensor]) -> int:
    """MAX_BATCH where the first dimension of every input is open, else 1."""
    firsts = [tensor.shape[0] if tensor.shape else 1 for tensor in inputs]
    return 1 if not firsts or any(isinstance(dim, int) for dim in firsts) else MAX_BATCH


def candidate_shapes(inputs: Sequence[Tensor]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shapes of one row to try, those of common models first; only inputs with an open dimension behind the first.

    Raises ConfigError for an input of unknown rank.
    """
    for tensor in inputs:
        if tensor.shape is None:
            raise ConfigError(
                f"input {tensor.name!r}: the file does not say how many dimensions it has; declare its shape by "
                "[[model.shapes]] in config.toml"
            )
    given: set[tuple[tuple[int, ...], ...]] = set()
    for at in range(max(len(_IMAGE_SIDES), len(_LENGTHS))):
        side, length = _IMAGE_SIDES[min(at, len(_IMAGE_SIDES) - 1)], _LENGTHS[min(at, len(_LENGTHS) - 1)]
        shape = {tensor.name: closed_shape(tensor, side, length) for tensor in inputs if is_open(tensor)}
        if (key := tuple(shape.values())) not in given:
            given.add(key)
            yield shape


def is_open(tensor: Tensor) -> bool:
    """Whether a dimension behind the first is open."""
    return any(not isinstance(dim, int) for dim in (tensor.shape or ())[1:])


def _shapes(runner: Runner) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The shapes to declare; none where no dimension behind the first is open. Raises ModelError and ConfigError."""
    runner.prepare([(0, runner.unit_count)])
    refused: ModelError | None = None
    for shape in candidate_shapes(runner.inputs):
        if not shape:
            return ()
        whole = {each.name: shape.get(each.name) or closed_shape(each, 1, 1) for each in runner.inputs}
        try:
            runner.run(0, runner.unit_count, make_inputs(runner.inputs, whole, 1, batched=False))
        except ModelError as error:
            refused = refused or error
            continue
        return (shape,)
    assert refused is not None
    name = next(tensor.name for tensor in runner.inputs if is_open(tensor))
    raise ModelError(
        runner.path,
        f"it runs at none of the input shapes that were tried ({refused.reason})",
        f"Declare a shape that it takes: [[model.shapes]] with a line like {name!r} = [1, ...] in its config.toml",
    )
