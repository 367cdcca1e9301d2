"""An ONNX graph in which a run of units works on chunks of the rows, which are put together behind it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import onnx
from onnx import TensorProto, helper

from cotenant.graph.onnx import dfg_of
from cotenant.graph.rewrite.chunks import check_chunks
from cotenant.graph.rewrite.onnx_rows import row_graph_of
from cotenant.graph.rewrite.rows import Shapes


def chunk_model(
    model: onnx.ModelProto, unit: int | tuple[int, int], rows: Sequence[int], shapes: Shapes
) -> onnx.ModelProto:
    """A copy of `model` in which a unit, or units [start, end), run for parts of the rows, each of its own operators.

    Units are those of `graph.onnx.dfg_of`. `rows` are those of each chunk, two of them at least; the new graph takes
    batches of their sum alone. `shapes` are of all inputs, of which the first dimension counts for nothing.

    Raises MixedRowsError when the units mix rows, InvalidValueError for units or rows that are none.
    Source: GACER (2023), section 4.2: chunk and concat.
    """
    dfg = dfg_of(model, name=model.graph.name or "graph", shapes=shapes)
    start, end = check_chunks(row_graph_of(model, dfg, shapes), unit, rows)
    by_output = {name: node for node in model.graph.node for name in node.output if name}
    ordered = [
        [by_output[op.outputs[0]] for at in each.operators if (op := dfg.operators[at]).outputs] for each in dfg.units
    ]
    before, run, behind = (
        [node for nodes in ordered[low:high] for node in nodes]
        for low, high in ((0, start), (start, end), (end, len(ordered)))
    )
    entering, leaving = dfg.segment_io(start, end)
    made = {name for node in run for name in node.output if name}
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 1)
    chunked = onnx.ModelProto()
    chunked.CopyFrom(model)
    graph = chunked.graph
    del graph.node[:]
    graph.node.extend(before)
    parts = [f"rows{low}" for low in accumulate((0, *rows[:-1]))]
    tag = f"units{start}to{end}"
    if opset >= 13:
        graph.initializer.append(helper.make_tensor(f"{tag}.sizes", TensorProto.INT64, (len(rows),), rows))
    for name in entering:
        outputs = [f"{name}.{tag}.{part}" for part in parts]
        if opset >= 13:
            graph.node.append(helper.make_node("Split", [name, f"{tag}.sizes"], outputs, f"{name}.{tag}", axis=0))
        else:
            graph.node.append(helper.make_node("Split", [name], outputs, f"{name}.{tag}", axis=0, split=list(rows)))
    for part in parts:
        own = {name: f"{name}.{tag}.{part}" for name in (*entering, *made)}
        for node in run:
            copy = graph.node.add()
            copy.CopyFrom(node)
            copy.name = f"{node.name or node.output[0]}.{tag}.{part}"
            copy.input[:] = [own.get(name, name) for name in node.input]
            copy.output[:] = [own.get(name, name) for name in node.output]
    for name in leaving:
        pieces = [f"{name}.{tag}.{part}" for part in parts]
        graph.node.append(helper.make_node("Concat", pieces, [name], f"{name}.{tag}", axis=0))
    graph.node.extend(behind)
    kept = [info for info in graph.value_info if info.name not in made or info.name in leaving]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    return chunked
