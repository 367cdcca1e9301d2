"""Finds in a torch program the units that treat every row of a batch by itself."""

from __future__ import annotations

from torch import fx

from cotenant.graph.dfg import Dfg
from cotenant.graph.rewrite.rows import PROBES, Extents, RowGraph, RowOperator, Shapes, extents_of
from cotenant.graph.rewrite.torch_rules import AtenView, aten_rule_of
from cotenant.graph.torch import TorchGraph
from cotenant.graph.torch_lower import aten_name, is_tensor
from cotenant.graph.torch_sizes import Sizes, expression_of


def row_graph_of_program(graph: TorchGraph, dfg: Dfg, shapes: Shapes) -> RowGraph:
    """The row graph of `dfg`, which was built from `graph`.

    `shapes` are those of all inputs; an open first dimension is the number of rows, at any size.
    """
    lowered = graph.lowered
    values = [node.meta["val"] for node in lowered.inputs]
    is_open = {
        name: value.ndim > 0 and not isinstance(expression_of(value.shape[0]), int)
        for name, value in zip(graph.inputs, values, strict=True)
    }
    probes = [
        Sizes.bound(
            graph.inputs,
            values,
            {name: (rows, *shape[1:]) if is_open[name] else tuple(shape) for name, shape in shapes.items()},
            lowered.ranges,
        )
        for rows in PROBES
    ]
    extents: dict[str, Extents] = {}
    for node in [*graph.names, *lowered.weights]:
        if is_tensor(node):
            shape = node.meta["val"].shape
            extents[_name(graph, node)] = extents_of([[sizes.size(dim) for dim in shape] for sizes in probes])
    by_name = {node.name: node for node in graph.nodes}
    steps = []
    for op in dfg.operators:
        node = by_name[op.name]
        view = AtenView(node, graph, probes)
        rule, read = aten_rule_of(view)
        steps.append(
            RowOperator(op.name, aten_name(node), tuple(_name(graph, each) for each in read), op.outputs, rule)
        )
    problem = "" if any(is_open.values()) else "the first dimension of every input is fixed"
    return RowGraph(dfg, tuple(steps), extents, problem=problem)


def _name(graph: TorchGraph, node: fx.Node) -> str:
    return graph.names.get(node, f"weight {node.name}")
