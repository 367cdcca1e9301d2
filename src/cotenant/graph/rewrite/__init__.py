"""Which units of a model treat every row by itself, and graphs in which some of them run in chunks of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def chunk(model: Any, unit: int | tuple[int, int], rows: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> Any:
    """A unit, or units [start, end), of an ONNX model or of an exported program of torch in chunks of so many rows.

    See `onnx_chunk.chunk_model`, which gives an ONNX model, and `torch_chunk.chunk_program`, which gives a module.
    """
    if type(model).__module__.partition(".")[0] == "torch":
        from cotenant.graph.rewrite.torch_chunk import chunk_program

        return chunk_program(model, unit, rows, shapes)
    from cotenant.graph.rewrite.onnx_chunk import chunk_model

    return chunk_model(model, unit, rows, shapes)
