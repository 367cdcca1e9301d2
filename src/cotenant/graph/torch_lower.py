"""Lowers an exported program for cutting: removes in-place operators and operators without effect.

torch.export keeps `relu_` and `x += y`. Tensors at a cut are kept for later, so a later operator must not change them.
Each in-place operator is replaced by the one that makes a new tensor, where the results are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from cotenant.graph.errors import GraphError
from cotenant.graph.torch_sizes import Ranges, limits

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_SAME = frozenset(["alias", "detach", "detach_", "lift", "lift_fresh", "lift_fresh_copy"])
_DROPOUT = frozenset(["dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_"])
_NORMS = {"batch_norm": 5, "instance_norm": 5, "cudnn_batch_norm": 5}
"""Operators that change their statistics in training, and the index of the argument that sets training mode."""
_MAY_SHARE = frozenset(["type_as", "meshgrid", "broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "cond"])
"""Operators with results that may be views of their inputs although their schema does not say so."""
_OPERATORS = (torch._ops.OpOverload, torch._ops.HigherOrderOperator, BuiltinFunctionType, FunctionType)
_CHECKS = frozenset(
    (
        *("_assert_async", "_assert_tensor_metadata", "_assert_scalar"),
        *("sym_constrain_range", "sym_constrain_range_for_size"),
    )
)


@dataclass(slots=True)
class Lowered:
    """A functional graph with its inputs and weights.

    `weights` has the full name of each weight's placeholder, `ranges` the allowed sizes of symbols. `trouble` says why
    the graph cannot be cut, or is "".
    """

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    weights: dict[fx.Node, str]
    outputs: tuple[fx.Node, ...]
    ranges: Ranges
    trouble: str = ""


def lower(program: torch.export.ExportedProgram) -> Lowered:
    """Copy the graph of `program` and make it functional. Raises GraphError if it keeps state or is in training."""
    lowered = _copy(program)
    _drop_what_does_nothing(lowered)
    if not _make_functional(lowered):
        try:  # torch's decomposition takes seconds and traces again, but supports views of views
            ranges = lowered.ranges
            lowered = _copy(program.run_decompositions({}))
            lowered.ranges = ranges
            _drop_what_does_nothing(lowered)
            done = _make_functional(lowered)
        except GraphError:
            raise
        except Exception:  # torch raises any exception; the program can still run as a whole
            done = False
        if not done:
            lowered.trouble = "it writes into tensors that are read in another place"
    _drop_unused(lowered)
    return lowered


def aten_name(node: fx.Node) -> str:
    """Name of a node's operator without namespace and overload, for example `conv2d`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def is_tensor(node: fx.Node) -> bool:
    """Whether a node makes one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _copy(program: torch.export.ExportedProgram) -> Lowered:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    found: Any = graph.graph_copy(program.graph, copies)
    for node in program.graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, _OPERATORS):
            raise GraphError(f"its operator {node.target} is of an unsupported kind")
    signature = program.graph_signature
    by_name = {node.name: copies[node] for node in program.graph.nodes if node.op == "placeholder"}
    inputs: list[fx.Node] = []
    weights: dict[fx.Node, str] = {}
    for spec in signature.input_specs:
        node = by_name[spec.arg.name]
        if spec.kind in _WEIGHTS and spec.target is not None:
            weights[node] = spec.target
        elif spec.kind is InputKind.USER_INPUT and is_tensor(node):
            inputs.append(node)
        elif node.users:
            raise GraphError(f"its input {node.name!r} is no tensor; export it with tensors as inputs alone")
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise GraphError("it changes its own state when it runs; export it in evaluation mode")
    made = found if isinstance(found, list | tuple) else [found]
    outputs = [node for node in made if isinstance(node, fx.Node)]
    if len(outputs) != len(made) or not outputs or not all(map(is_tensor, outputs)):
        raise GraphError("it gives something that is no tensor; return tensors alone")
    graph.output(tuple(outputs))
    return Lowered(graph, tuple(inputs), weights, tuple(outputs), limits(program))


def _drop_what_does_nothing(lowered: Lowered) -> None:
    for node in list(lowered.graph.nodes):
        if node.op != "call_function":
            continue
        name = aten_name(node)
        if name in _CHECKS:
            if node.users:
                raise GraphError(f"it reads the result of the check {name!r}; export it without")
            lowered.graph.erase_node(node)
        elif _is_training(name, node):
            raise GraphError(f"its {name} is in training mode; call eval() on the module before it is exported")
        elif name in _DROPOUT or name in _SAME:
            node.replace_all_uses_with(node.args[0])
            lowered.graph.erase_node(node)
    lowered.outputs = _outputs_of(lowered.graph)


def _is_training(name: str, node: fx.Node) -> bool:
    if name == "instance_norm" and argument(node, 3) is None:
        return False
    if name in _NORMS:
        return argument(node, _NORMS[name]) is True
    return name in _DROPOUT and argument(node, 2) is not False and argument(node, 1) != 0


def _outputs_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    return tuple(next(iter(reversed(graph.nodes))).args[0])


def argument(node: fx.Node, position: int) -> Any:
    """An argument of an operator by its position in the schema; its default if omitted."""
    expected = node.target._schema.arguments[position]  # type: ignore[union-attr]
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(expected.name, expected.default_value)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The given arguments of an operator by their names in the schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {**{f"argument_{place}": value for place, value in enumerate(node.args)}, **node.kwargs}
    expected = node.target._schema.arguments
    return {**{each.name: value for each, value in zip(expected, node.args, strict=False)}, **node.kwargs}


def _make_functional(lowered: Lowered) -> bool:
    """Replace in-place operators; returns False when one is left. Raises GraphError when a weight is written."""
    graph = lowered.graph
    place = {node: position for position, node in enumerate(graph.nodes)}
    family = _families(graph)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node, root in family.items():
        members.setdefault(root, []).append(node)
    done = True
    for node in list(graph.nodes):
        written = _written(node)
        if not written:
            continue
        target = node.args[0] if node.args else None
        if not isinstance(target, fx.Node) or written != [0]:
            done = False
            continue
        relatives = [each for each in members[family[target]] if place[each] < place[node]]
        if any(each in lowered.weights for each in relatives):
            raise GraphError(f"it changes its weight {target.name!r} when it runs; export it in evaluation mode")
        if any(place[user] > place[node] for each in relatives for user in each.users):
            done = False
            continue
        done = _replace(graph, node) and done
    lowered.outputs = _outputs_of(graph)
    return done


def _families(graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
    """For each node, the first node with which it may share memory."""
    parent: dict[fx.Node, fx.Node] = {node: node for node in graph.nodes}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in graph.nodes:
        for source in _shared(node):
            parent[root(node)] = root(source)
    return {node: root(node) for node in graph.nodes}


def _shared(node: fx.Node) -> list[fx.Node]:
    """The inputs with which the result of a node may share memory."""
    if node.op != "call_function":
        return []
    if not isinstance(node.target, torch._ops.OpOverload) or aten_name(node) in _MAY_SHARE:
        return node.all_input_nodes
    schema = node.target._schema
    if all(each.alias_info is None for each in schema.returns):
        return []
    given = arguments(node)
    shared: list[fx.Node] = []
    fx.node.map_arg([given.get(each.name) for each in schema.arguments if each.alias_info is not None], shared.append)
    return shared


def _written(node: fx.Node) -> list[int]:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [
        position
        for position, each in enumerate(node.target._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]


def _replace(graph: fx.Graph, node: fx.Node) -> bool:
    """Call the operator of the same name that makes a new tensor, with the type of the tensor that was written."""
    target: Any = node.target
    namespace = getattr(torch.ops, target.namespace)
    packet = getattr(namespace, aten_name(node).removesuffix("_"), None)
    functional = getattr(packet, target._overloadname, None)
    if functional is None or not is_tensor(node):
        return False
    node.target = functional
    kinds = {each.meta["val"].dtype for each in node.all_input_nodes if is_tensor(each)}
    if len(kinds) > 1:
        with graph.inserting_after(node):
            cast = graph.call_function(torch.ops.aten.to.dtype, (node, node.meta["val"].dtype))
        cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return True


def _drop_unused(lowered: Lowered) -> None:
    for node in reversed(list(lowered.graph.nodes)):
        if not node.users and node.op not in ("output", "placeholder") and not _written(node):
            lowered.graph.erase_node(node)
