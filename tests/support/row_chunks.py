"""Units of an ONNX graph in chunks of the rows, beside the same units on all rows: what row graphs are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import onnx
from onnx import helper

from cotenant.graph.dfg import Dfg
from port_graphs import Arrays, onnx_answer


def check_chunks(
    model: onnx.ModelProto,
    dfg: Dfg,
    units: tuple[int, int],
    rows: Sequence[int],
    feeds: Mapping[str, Any],
    tolerance: float = 1e-5,
) -> None:
    """Assert that units [start, end) make of chunks of so many rows what they make of all rows of `feeds`."""
    entering, leaving = dfg.segment_io(*units)
    asked = [name for name in dict.fromkeys((*entering, *leaving)) if name not in feeds]
    whole = {**feeds, **onnx_answer(_with_outputs(model, asked), feeds)}
    part = _between(model, {name: whole[name] for name in entering}, leaving)
    pieces: list[Arrays] = []
    for low, high in pairwise(accumulate(rows, initial=0)):
        taken = {name: whole[name][low:high] if np.ndim(whole[name]) else whole[name] for name in entering}
        pieces.append(onnx_answer(part, taken))
    assert leaving
    for name in leaving:
        joined = np.concatenate([piece[name] for piece in pieces])
        assert joined.shape == whole[name].shape
        np.testing.assert_allclose(joined, whole[name], rtol=tolerance, atol=tolerance, err_msg=name)


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy that gives these tensors; onnxruntime finds their types."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.output[:]
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return made


def _between(model: onnx.ModelProto, entering: Mapping[str, Any], leaving: Sequence[str]) -> onnx.ModelProto:
    """A copy with the operators alone that make some tensors of others, for any number of rows."""
    makers = {name: node for node in model.graph.node for name in node.output if name}
    wanted, found = list(leaving), set[str]()
    while wanted:
        name = wanted.pop()
        if name and name in makers and name not in entering and name not in found:
            found.update(makers[name].output)
            wanted.extend(makers[name].input)
    made = _with_outputs(model, leaving)
    del made.graph.node[:], made.graph.input[:], made.graph.value_info[:]
    made.graph.node.extend(node for node in model.graph.node if found.intersection(filter(None, node.output)))
    made.graph.input.extend(
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), [None, *value.shape[1:]] if value.ndim else []
        )
        for name, value in entering.items()
    )
    return made
