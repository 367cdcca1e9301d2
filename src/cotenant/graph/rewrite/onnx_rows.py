"""Finds in an ONNX graph the units that treat every row of a batch by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TypeProto, numpy_helper

from cotenant.graph.dfg import Dfg
from cotenant.graph.infer import Types, Values, dims_of, infer_types
from cotenant.graph.onnx import bind_inputs
from cotenant.graph.rewrite.onnx_rules import SIZES, NodeView, rule_of
from cotenant.graph.rewrite.rows import PROBES, RowGraph, RowOperator, Shapes, extents_of


def row_graph_of(
    model: onnx.ModelProto, dfg: Dfg, shapes: Shapes, known_at: Callable[[Shapes], Types] = lambda _: {}
) -> RowGraph:
    """The row graph of `dfg`, which was read from `model`.

    `shapes` are those of all inputs; an open first dimension is the number of rows, at any size. `known_at` returns
    types found elsewhere for given shapes.
    """
    graph = model.graph
    constants = {init.name for init in graph.initializer} | {init.values.name for init in graph.sparse_initializer}
    inputs = [info for info in graph.input if info.name not in constants]
    is_open = {info.name: _is_open(info.type) for info in inputs}
    by_output = {name: node for node in graph.node for name in node.output if name}
    nodes = [by_output[op.outputs[0]] for op in dfg.operators if op.outputs]
    found: list[tuple[Types, Values]] = []
    problem = "" if any(is_open.values()) else "the first dimension of every input is fixed"
    for rows in PROBES:
        at = {name: (rows, *shape[1:]) if is_open.get(name) else tuple(shape) for name, shape in shapes.items()}
        values: Values = {}
        found.append((infer_types(model, nodes, {**known_at(at), **bind_inputs(inputs, at)[0]}, values), values))
    (types, first), (others, second) = found
    names = set(types) & set(others)
    extents = {name: extents_of([dims_of(types[name]), dims_of(others[name])]) for name in sorted(names)}
    same: set[str] = set()
    differ: set[str] = set()
    for name in sorted(set(first) & set(second)):
        a, b = numpy_helper.to_array(first[name]), numpy_helper.to_array(second[name])
        if a.shape == b.shape:
            (same if np.array_equal(a, b) else differ).add(name)
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 1)
    steps = []
    for op, node in zip([op for op in dfg.operators if op.outputs], nodes, strict=True):
        view = NodeView(node, extents, {name: first[name] for name in node.input if name in same}, opset)
        rule = rule_of(view)
        steps.append(
            RowOperator(
                op.name,
                op.op_type,
                tuple(node.input),
                tuple(filter(None, node.output)),
                rule,
                SIZES.get(op.op_type, frozenset()),
            )
        )
    return RowGraph(dfg, tuple(steps), extents, frozenset(differ), frozenset(same), problem)


def _is_open(kind: TypeProto) -> bool:
    dims = dims_of(kind)
    return dims is not None and len(dims) > 0 and not isinstance(dims[0], int)
