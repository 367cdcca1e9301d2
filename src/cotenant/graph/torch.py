"""Reads an exported torch program into a `Dfg`, with the same units, boundaries and costs as from an ONNX file.

Sizes of tensors are not tensors: a number computed from sizes belongs to no unit and crosses no cut. A segment computes
it again from the tensors that it reads. There is no boundary where that is impossible.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from cotenant.graph.dfg import Dfg, Dim, Operator, Tensor, build_dfg
from cotenant.graph.errors import GraphError
from cotenant.graph.torch_lower import Lowered, arguments, aten_name, lower
from cotenant.graph.torch_names import input_names, output_names
from cotenant.graph.torch_ops import macs_of, op_type_of
from cotenant.graph.torch_sizes import Sizes, expression_of
from cotenant.graph.units import fuse, merge_across

TYPES: dict[torch.dtype, str] = {
    torch.float32: "tensor(float)",
    torch.float64: "tensor(double)",
    torch.float16: "tensor(float16)",
    torch.bfloat16: "tensor(bfloat16)",
    torch.bool: "tensor(bool)",
    **{getattr(torch, text): f"tensor({text})" for text in ("int8", "int16", "int32", "int64")},
    **{getattr(torch, text): f"tensor({text})" for text in ("uint8", "uint16", "uint32", "uint64")},
}
"""onnxruntime's name of each element type."""


@dataclass(slots=True)
class TorchGraph:
    """A lowered graph with the names of its tensors.

    `nodes` are the operators in program order; `made` has the tensor nodes of each operator. Numbers computed from
    sizes are in neither. Numbers that depend on values are operators with results that never cross a cut.
    """

    lowered: Lowered
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: list[fx.Node] = field(default_factory=list)
    made: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    sealed: set[str] = field(default_factory=set)

    @property
    def by_name(self) -> dict[str, fx.Node]:
        """Nodes by the names of their tensors."""
        return {name: node for node, name in self.names.items()}


def dfg_of_program(
    program: torch.export.ExportedProgram, name: str, shapes: Mapping[str, Sequence[int]] | None = None
) -> Dfg:
    """Read an exported program into operators, units and cuts, with MACs and bytes.

    `shapes` binds inputs to shapes for costing. Open dynamic dimensions are taken as 1, or as the smallest allowed
    size, and listed in `Dfg.assumed`. Raises GraphError when the program keeps state, has inputs or outputs that are
    not tensors, or `shapes` does not fit its inputs.
    """
    lowered = lower(program)
    entry = program.module_call_graph[0].signature
    placeholders = [node.name for node in lowered.inputs]
    inputs, outputs = tuple(placeholders), output_names("", len(lowered.outputs))
    if entry is not None:
        inputs = input_names(pytree.treespec_dumps(entry.in_spec), entry.forward_arg_names, placeholders)
        outputs = output_names(pytree.treespec_dumps(entry.out_spec), len(lowered.outputs))
    return dfg_of_graph(named_graph(lowered, inputs, outputs), name, shapes)


def named_graph(lowered: Lowered, inputs: Sequence[str], outputs: Sequence[str]) -> TorchGraph:
    """Find the operators of a lowered graph and name its tensors: inputs and outputs as given, others by their node.

    Raises GraphError when an output has the name of an input.
    """
    graph = TorchGraph(lowered, tuple(inputs), tuple(outputs))
    if both := sorted(set(inputs) & set(outputs)):
        raise GraphError(f"output {both[0]!r} has the name of an input, expected names of its own")
    _own_outputs(lowered)
    graph.names.update(zip(lowered.inputs, inputs, strict=True))
    graph.names.update(zip(lowered.outputs, outputs, strict=True))
    used = set(graph.names.values())
    valued: dict[fx.Node, bool] = {}
    for node in lowered.graph.nodes:
        if node.op != "call_function":
            continue
        if _is_number(node) and not _depends_on_values(node, valued):
            continue
        if node.target is operator.getitem and node.args[0] in graph.made:
            continue
        parts = _parts(node)
        graph.nodes.append(node)
        graph.made[node] = parts
        for part in parts:
            if part in graph.names:
                continue
            name = part.name
            while name in used:
                name += "_"
            used.add(name)
            graph.names[part] = name
        graph.sealed.update(graph.names[part] for part in parts if not isinstance(part.meta.get("val"), torch.Tensor))
    return graph


def dfg_of_graph(graph: TorchGraph, name: str, shapes: Mapping[str, Sequence[int]] | None = None) -> Dfg:
    """Build the `Dfg` of a named graph; see `dfg_of_program`."""
    lowered = graph.lowered
    sizes = Sizes.bound(graph.inputs, [node.meta["val"] for node in lowered.inputs], shapes or {}, lowered.ranges)
    operators = [_operator(index, node, graph, sizes) for index, node in enumerate(graph.nodes)]
    inputs = [_declared(graph.names[node], node, sizes) for node in lowered.inputs]
    outputs = [_declared(graph.names[node], node, sizes) for node in lowered.outputs]
    tensors = {
        each.name: each for node, each in ((node, _costed(text, node, sizes)) for node, text in graph.names.items())
    }
    if lowered.trouble:
        groups = [list(range(len(operators)))]
    else:
        groups = fuse(operators, graph.outputs)
        if graph.sealed:
            groups = merge_across(operators, groups, graph.sealed)

    def build(groups: Sequence[Sequence[int]]) -> Dfg:
        return build_dfg(name, operators, groups, inputs, outputs, tensors, sizes.assumed)

    dfg = build(groups)
    closed = [] if lowered.trouble else _closed_boundaries(graph, dfg)
    if closed:
        joined: list[list[int]] = []
        for index, group in enumerate(groups):
            if index in closed:
                joined[-1].extend(group)
            else:
                joined.append(list(group))
        dfg = build(joined)
    return dfg


def size_sources(dfg: Dfg, graph: TorchGraph, boundary: int) -> tuple[str, ...]:
    """Tensors that exist at a boundary, from which sizes can be computed again."""
    return graph.inputs if boundary == 0 else dfg.live(boundary)


def _closed_boundaries(graph: TorchGraph, dfg: Dfg) -> list[int]:
    """Boundaries after which a size is needed that cannot be computed from the tensors there."""
    by_operator = {node.name: node for node in graph.nodes}
    home = {text: unit.index for unit in dfg.units for at in unit.operators for text in dfg.operators[at].outputs}
    wanted = [
        (unit.index, each)
        for unit in dfg.units
        for at in unit.operators
        for each in by_operator[dfg.operators[at].name].all_input_nodes
        if is_size(graph, each)
    ]
    by_name = graph.by_name
    closed = []
    for boundary in range(1, len(dfg.units)):
        at_hand = frozenset(dfg.live(boundary))
        dims = {dim for text in dfg.live(boundary) for dim in _expressions(by_name[text])}
        finder = _SizeFinder(graph, at_hand | {text for text, unit in home.items() if unit >= boundary}, dims)
        if not all(finder.can(node) for unit, node in wanted if unit >= boundary):
            closed.append(boundary)
    return closed


@dataclass(slots=True)
class _SizeFinder:
    """Whether sizes can be computed from some tensors: from a dimension that equals them, or as in the program."""

    graph: TorchGraph
    tensors: frozenset[str]
    dims: set[Any]
    known: dict[fx.Node, bool] = field(default_factory=dict)

    def can(self, node: fx.Node) -> bool:
        if node not in self.known:
            self.known[node] = self._can(node)
        return self.known[node]

    def _can(self, node: fx.Node) -> bool:
        expression = expression_of(node.meta.get("val"))
        if expression is not None and (isinstance(expression, int) or expression in self.dims):
            return True
        return all(
            self.can(source) if is_size(self.graph, source) else self.graph.names.get(source) in self.tensors
            for source in node.all_input_nodes
        )


def _expressions(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return [expression_of(dim) for dim in value.shape] if isinstance(value, torch.Tensor) else []


def _own_outputs(lowered: Lowered) -> None:
    """Give every output a node of its own: copy outputs that are an input, a weight, or repeated."""
    graph = lowered.graph
    end = next(iter(reversed(graph.nodes)))
    seen: set[fx.Node] = set()
    outputs = []
    for node in lowered.outputs:
        if node.op == "placeholder" or node in seen:
            with graph.inserting_before(end):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = {"val": node.meta["val"]}
            node = copy
        seen.add(node)
        outputs.append(node)
    lowered.outputs = tuple(outputs)
    end.args = (lowered.outputs,)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def is_size(graph: TorchGraph, node: fx.Node) -> bool:
    """Whether a node is a number computed from sizes, which belongs to no unit."""
    return _is_number(node) and node not in graph.names


def _depends_on_values(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a number, or a number that it is computed from, is read from a tensor."""
    if node not in known:
        known[node] = any(
            _depends_on_values(source, known) if _is_number(source) else not aten_name(node).startswith("sym_")
            for source in node.all_input_nodes
        )
    return known[node]


def _parts(node: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes of an operator's results: itself, or the members of its list that are used, and the list if it is used."""
    if not isinstance(node.meta.get("val"), list | tuple):
        return (node,)
    taken = [user for user in node.users if user.target is operator.getitem]
    return (*taken, node) if len(taken) < len(node.users) else tuple(taken)


def _operator(index: int, node: fx.Node, graph: TorchGraph, sizes: Sizes) -> Operator:
    read = [each for each in node.all_input_nodes if each in graph.names]
    weights = [each for each in node.all_input_nodes if each in graph.lowered.weights]
    made = graph.made[node]
    given = arguments(node)
    shapes = {key: [_shape(each, sizes) for each in _nodes_in(value)] for key, value in given.items()}
    outputs = [_shape(each, sizes) for each in made]
    name = aten_name(node)
    macs = macs_of(name, given, {key: each for key, each in shapes.items() if each}, outputs)
    tensors = [each for each in (*read, *made) if isinstance(each.meta.get("val"), torch.Tensor)]
    return Operator(
        index=index,
        name=node.name,
        op_type=op_type_of(name.removesuffix("_")),
        domain="aten",
        inputs=tuple(dict.fromkeys(graph.names[each] for each in read)),
        outputs=tuple(graph.names[each] for each in made),
        constants=tuple(dict.fromkeys(graph.lowered.weights[each] for each in weights)),
        macs=macs or 0,
        read_bytes=sum(_bytes(each, sizes) for each in dict.fromkeys(read)),
        write_bytes=sum(_bytes(each, sizes) for each in made),
        weight_bytes=sum(_bytes(each, sizes) for each in dict.fromkeys(weights)),
        is_costed=macs is not None and name != "cond" and all(_shape(each, sizes) is not None for each in tensors),
    )


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return [node for node in found if isinstance(node.meta.get("val"), torch.Tensor)]


def _shape(node: fx.Node, sizes: Sizes) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return sizes.shape(value) if isinstance(value, torch.Tensor) else None


def _bytes(node: fx.Node, sizes: Sizes) -> int:
    shape = _shape(node, sizes)
    return 0 if shape is None else prod(shape) * node.meta["val"].dtype.itemsize


def _costed(name: str, node: fx.Node, sizes: Sizes) -> Tensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return Tensor(name, "", None)
    shape: list[Dim] = [sizes.size(dim) for dim in value.shape]
    return Tensor(name, TYPES.get(value.dtype, ""), tuple(shape), _bytes(node, sizes))


def _declared(name: str, node: fx.Node, sizes: Sizes) -> Tensor:
    """An input or output with its dynamic dimensions open; bytes at the costed shape."""
    value = node.meta["val"]
    if value.dtype not in TYPES:
        raise GraphError(f"its tensor {name!r} has the unsupported type {value.dtype}")
    dims = tuple(dim if isinstance(dim, int) else str(expression_of(dim)) for dim in value.shape)
    return Tensor(name, TYPES[value.dtype], dims, _bytes(node, sizes))
