"""Reads an ONNX file into a `Dfg`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import onnx
from onnx import TensorProto, TypeProto, helper

from cotenant.files import open_regular
from cotenant.graph.costs import CostedNode, Shape, count_macs, rule_name
from cotenant.graph.dfg import Dfg, Dim, Operator, Tensor, build_dfg
from cotenant.graph.errors import GraphError
from cotenant.graph.infer import Types, dims_of, infer_types, is_static, tensor_type
from cotenant.graph.units import fuse, merge_across

_ORT_NAMES: dict[int, str] = {
    TensorProto.FLOAT: "float",
    TensorProto.DOUBLE: "double",
    TensorProto.INT8: "int8",
    TensorProto.INT16: "int16",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.UINT8: "uint8",
    TensorProto.UINT16: "uint16",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT64: "uint64",
    TensorProto.BOOL: "bool",
    TensorProto.STRING: "string",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}
_ELEMENT_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 14: 8, 15: 16, 16: 2}
_MOST_BYTES = (1 << 31) - 1
"""Largest ONNX file: the limit of protobuf messages."""
_WORDS = frozenset({"pool_strings", "keys_strings", "keys_tensor", "cats_strings", "string_vocabulary"})
"""Attributes with the texts that an operator looks up."""
_MOST_WORDS = 4096
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})


def load_dfg(path: Path, *, name: str = "", shapes: Mapping[str, Sequence[int]] | None = None) -> Dfg:
    """Read the ONNX file at `path` into operators, units and cuts, with MACs and bytes.

    `shapes` binds inputs to shapes for costing; open dynamic dimensions are taken as 1 and listed in `Dfg.assumed`. The
    operators are those of the file; `execute.onnx.segments` uses the operators that onnxruntime fuses further.

    Raises GraphError when the file is no readable ONNX model or `shapes` does not fit its inputs.
    """
    return dfg_of(read_model(path), name=name or path.stem, shapes=shapes)


def read_model(path: Path) -> onnx.ModelProto:
    """Read `path` without its external weights. Raises GraphError when that fails."""
    if not path.exists():
        raise GraphError(f"model file {path} does not exist; check the path")
    hint = "an ONNX file is a regular one of less than 2 GiB, with larger weights in files beside it"
    try:
        with open_regular(path, GraphError, hint, _MOST_BYTES) as file:
            model = onnx.load_model_from_string(file.read())
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(f"model file {path} is no readable ONNX model ({error}); export it again") from error
    if not model.graph.name and not model.graph.node and not model.graph.output:
        raise GraphError(
            f"model file {path} holds no ONNX graph; it may be cut short or another format: export it again"
        )
    return model


def vocabulary(path: Path) -> tuple[str, ...]:
    """Words that operators of a model look up in its inputs, each once, `_MOST_WORDS` at most. Raises GraphError."""
    words: dict[str, None] = {}
    for node in read_model(path).graph.node:
        for given in node.attribute:
            if given.name in _WORDS:
                found = given.t.string_data if given.HasField("t") else given.strings
                words |= dict.fromkeys(each.decode(errors="replace") for each in found[:_MOST_WORDS])
    return tuple(word for word in words if word)[:_MOST_WORDS]


def dfg_of(
    model: onnx.ModelProto,
    *,
    name: str,
    shapes: Mapping[str, Sequence[int]] | None = None,
    known: Mapping[str, TypeProto] | None = None,
    sealed: Sequence[str] = (),
    is_cuttable: bool = True,
) -> Dfg:
    """Build the `Dfg` of a loaded model.

    `known` are types found elsewhere (by onnxruntime); `sealed` are tensors that must not cross a unit boundary.
    Without `is_cuttable` the graph becomes one unit. Raises GraphError when `shapes` does not fit or the graph has a
    cycle.
    """
    graph = model.graph
    constants = {init.name for init in graph.initializer} | {init.values.name for init in graph.sparse_initializer}
    inputs = [info for info in graph.input if info.name not in constants]
    bound, assumed = bind_inputs(inputs, shapes or {})
    nodes = _topological(graph.node, constants | {info.name for info in inputs}, name)
    types = infer_types(model, nodes, {**(known or {}), **bound})
    operators = [_operator(index, node, types, constants) for index, node in enumerate(nodes)]
    outputs = [info.name for info in graph.output]
    groups = fuse(operators, outputs)
    if not is_cuttable:
        groups = [[position for group in groups for position in group]]
    elif sealed:
        groups = merge_across(operators, groups, frozenset(sealed))
    made = [info.name for info in inputs] + [output for op in operators for output in op.outputs]
    return build_dfg(
        model=name,
        operators=operators,
        groups=groups,
        inputs=[_declared(info.name, info.type, types) for info in inputs],
        outputs=[_declared(info.name, info.type, types) for info in graph.output],
        tensors={tensor: _tensor(tensor, types.get(tensor)) for tensor in made},
        assumed=assumed,
    )


def bind_inputs(
    inputs: Sequence[onnx.ValueInfoProto], shapes: Mapping[str, Sequence[int]]
) -> tuple[Types, tuple[str, ...]]:
    """Bind every input to a fixed shape: from `shapes`, or as declared with open dimensions taken as 1.

    Returns the types and the names of the assumed dimensions. A dimension's name has the same size in all inputs.
    Raises GraphError when a name, rank or fixed size does not fit.
    """
    unknown = sorted(set(shapes) - {info.name for info in inputs})
    if unknown:
        names = ", ".join(info.name for info in inputs)
        raise GraphError(f"shapes name an input {unknown[0]!r} that the model does not have; its inputs are {names}")
    sizes: dict[str, int] = {}
    for info in inputs:
        declared = dims_of(info.type)
        given = shapes.get(info.name)
        if given is None or declared is None:
            continue
        if len(given) != len(declared) or any(isinstance(d, int) and d != g for d, g in zip(declared, given)):  # noqa: B905
            raise GraphError(f"input {info.name!r} cannot have shape {tuple(given)}: the model declares {declared}")
        sizes.update({d: g for d, g in zip(declared, given, strict=True) if isinstance(d, str)})
    types: Types = {}
    assumed: dict[str, None] = {}
    for info in inputs:
        declared = dims_of(info.type)
        given = shapes.get(info.name)
        if not info.type.HasField("tensor_type") or (declared is None and given is None):
            continue
        dims: list[Dim] = list(given) if given is not None else []
        for axis, dim in enumerate(declared or ()) if given is None else ():
            if isinstance(dim, int) or dim in sizes:
                dims.append(dim if isinstance(dim, int) else sizes[str(dim)])
            else:
                dims.append(1)
                assumed[dim or f"{info.name}[{axis}]"] = None
        types[info.name] = tensor_type(info.type.tensor_type.elem_type, dims)
    return types, tuple(assumed)


def type_string(kind: TypeProto | None) -> str:
    """onnxruntime's name of a type, for example `tensor(float)`; "" when unknown."""
    if kind is None:
        return ""
    match kind.WhichOneof("value"):
        case "tensor_type":
            element = _ORT_NAMES.get(kind.tensor_type.elem_type)
            return f"tensor({element})" if element else ""
        case "sequence_type":
            return f"seq({type_string(kind.sequence_type.elem_type)})"
        case "optional_type":
            return f"optional({type_string(kind.optional_type.elem_type)})"
        case _:
            return ""


def parse_type(text: str, shape: Sequence[Dim] | None = None) -> TypeProto | None:
    """Inverse of `type_string`; None for a type that cannot be passed between segments."""
    elements = {name: number for number, name in _ORT_NAMES.items()}
    outer, _, rest = text.partition("(")
    inner = rest.removesuffix(")")
    if outer == "tensor" and inner in elements:
        return tensor_type(elements[inner], shape)
    if outer in ("seq", "optional"):
        element = parse_type(inner)
        if element is not None:
            make = helper.make_sequence_type_proto if outer == "seq" else helper.make_optional_type_proto
            return make(element)
    return None


def captured(node: onnx.NodeProto) -> Iterator[str]:
    """Names that the sub-graphs of `node` capture from their scope, in order of use."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs) if attribute.type in _GRAPH_ATTRIBUTES else ():
            own = {i.name for i in graph.initializer} | {i.name for i in graph.input}
            own |= {i.values.name for i in graph.sparse_initializer}
            for inner in graph.node:
                yield from (name for name in (*inner.input, *captured(inner)) if name and name not in own)
                own.update(inner.output)
            yield from (info.name for info in graph.output if info.name not in own)


_GRAPH_ATTRIBUTES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def node_inputs(node: onnx.NodeProto) -> tuple[str, ...]:
    """All names that `node` reads, including captured values, without repeats."""
    return tuple(dict.fromkeys(name for name in (*node.input, *captured(node)) if name))


def _topological(nodes: Sequence[onnx.NodeProto], known: set[str], model: str) -> list[onnx.NodeProto]:
    """`nodes` in topological order, close to the file's order (which is sorted by specification)."""
    have = set(known)
    made = {name for node in nodes for name in node.output}
    ordered: list[onnx.NodeProto] = []
    waiting = list(nodes)
    while waiting:
        blocked: list[onnx.NodeProto] = []
        for node in waiting:
            if all(name in have or name not in made for name in node_inputs(node)):
                ordered.append(node)
                have.update(node.output)
            else:
                blocked.append(node)
        if len(blocked) == len(waiting):
            raise GraphError(f"model {model!r} has a cycle through node {blocked[0].name!r}; export it again")
        waiting = blocked
    return ordered


def _operator(index: int, node: onnx.NodeProto, types: Types, constants: set[str]) -> Operator:
    names = node_inputs(node)
    macs = count_macs(
        CostedNode(
            rule_name(node.op_type, node.domain),
            {a.name: helper.get_attribute_value(a) for a in node.attribute if a.type in _PLAIN_ATTRIBUTES},
            [_shape(types.get(name)) for name in node.input],
            [_shape(types.get(name)) for name in node.output],
        )
    )
    inputs = tuple(name for name in names if name not in constants)
    outputs = tuple(name for name in node.output if name)
    weights = tuple(name for name in names if name in constants)
    return Operator(
        index=index,
        name=node.name,
        op_type=node.op_type,
        domain=node.domain,
        inputs=inputs,
        outputs=outputs,
        constants=weights,
        macs=macs or 0,
        read_bytes=sum(_bytes(types.get(name)) for name in inputs),
        write_bytes=sum(_bytes(types.get(name)) for name in outputs),
        weight_bytes=sum(_bytes(types.get(name)) for name in weights),
        is_costed=macs is not None
        and node.op_type not in _CONTROL_FLOW
        and all(is_static(types.get(name)) for name in (*inputs, *outputs)),
    )


_PLAIN_ATTRIBUTES = (onnx.AttributeProto.INT, onnx.AttributeProto.INTS)


def _shape(kind: TypeProto | None) -> Shape:
    dims = dims_of(kind)
    sizes = tuple(dim for dim in dims or () if isinstance(dim, int))
    return sizes if dims is not None and len(sizes) == len(dims) else None


def _bytes(kind: TypeProto | None) -> int:
    shape = _shape(kind)
    if kind is None or shape is None:
        return 0
    return prod(shape) * _ELEMENT_BYTES.get(kind.tensor_type.elem_type, 0)


def _tensor(name: str, kind: TypeProto | None) -> Tensor:
    return Tensor(name, type_string(kind), dims_of(kind), _bytes(kind))


def _declared(name: str, kind: TypeProto, types: Types) -> Tensor:
    """A graph input or output with its declared shape, dynamic dimensions open; bytes at the costed shape."""
    costed = types.get(name)
    return Tensor(name, type_string(kind) or type_string(costed), dims_of(kind), _bytes(costed))
