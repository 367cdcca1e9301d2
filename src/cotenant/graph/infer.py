"""Infers the shapes of the tensors of a graph without running it.

Node by node in topological order, by onnx's inference for standard operators and by rules below for onnxruntime's
contrib operators. Small integer computations that shapes are made of (Shape, Gather, Concat...) are evaluated. A node
without a rule leaves its outputs unknown, and inference continues after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TypeProto, helper, numpy_helper, shape_inference

from cotenant.graph.dfg import Dim


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FOLDED = _names(
    "Shape Size Gather Unsqueeze Squeeze Concat Slice Cast Mul Add Sub Div ConstantOfShape Reshape Range Equal Where "
    "Expand Identity Constant Min Max Floor Ceil Neg ReduceProd"
)
_MAX_FOLDED = 1024
"""Largest integer tensor that is evaluated, in elements: shape computations are far smaller, masks far larger."""

_CONTRIB_AS_STANDARD = {"FusedConv": "Conv", "FusedGemm": "Gemm", "FusedMatMul": "MatMul", "TransposeMatMul": "MatMul"}
_FIRST_INPUT_SHAPE = _names(
    "BiasAdd BiasGelu BiasSoftmax FastGelu Gelu QuickGelu SkipLayerNormalization SkipSimplifiedLayerNormalization "
    "SimplifiedLayerNormalization ReorderInput ReorderOutput QuantizeLinear DequantizeLinear Attention "
    "MultiHeadAttention QLinearAdd QLinearMul QLinearSigmoid QLinearLeakyRelu GroupNorm"
)
_FUSED_ONLY = _names("activation activation_params alpha transBatchA transBatchB")

Types = dict[str, TypeProto]
Values = dict[str, onnx.TensorProto]


def infer_types(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    known: Mapping[str, TypeProto],
    found: Values | None = None,
) -> Types:
    """Types of the tensors of `model`, with shapes where known. `nodes` are its nodes in topological order.

    `known` overrides the types in the file. `found` gets the values of small tensors that can be computed. Unknown
    tensors are absent or have no shape.
    """
    graph, opsets, ir_version = model.graph, model.opset_import, model.ir_version
    types: Types = {init.name: tensor_type(init.data_type, tuple(init.dims)) for init in graph.initializer}
    for info in (*graph.value_info, *graph.output, *graph.input):
        if info.type.WhichOneof("value") and info.name not in types:
            types[info.name] = info.type
    types.update(known)
    values = {} if found is None else found
    values.update(
        (init.name, init)
        for init in graph.initializer
        if init.data_location != onnx.TensorProto.EXTERNAL and int(np.prod(init.dims)) <= _MAX_FOLDED
    )
    versions = {opset.domain or "": opset.version for opset in opsets}
    for node in nodes:
        if all(not name or is_static(types.get(name)) for name in node.output) and node.op_type not in _FOLDED:
            continue
        for name, kind in _infer_node(node, types, values, versions, opsets, ir_version).items():
            if name and (name not in types or not is_static(types[name])):
                types[name] = kind
        _fold(node, types, values, opsets)
    return types


def tensor_type(elem_type: int, shape: Sequence[Dim] | None) -> TypeProto:
    """Build a tensor type; with the shape None the rank is open."""
    return helper.make_tensor_type_proto(elem_type, shape)


def dims_of(kind: TypeProto | None) -> tuple[Dim, ...] | None:
    """The shape in a type: sizes, names of dynamic dimensions, None without a name; None for an unknown rank."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in kind.tensor_type.shape.dim
    )


def is_static(kind: TypeProto | None) -> bool:
    """Whether the size of every dimension is known."""
    dims = dims_of(kind)
    return dims is not None and all(isinstance(dim, int) for dim in dims)


def _infer_node(
    node: onnx.NodeProto,
    types: Types,
    values: Mapping[str, onnx.TensorProto],
    versions: Mapping[str, int],
    opsets: Sequence[onnx.OperatorSetIdProto],
    ir_version: int,
) -> Types:
    if node.domain in ("", "ai.onnx"):
        return _infer_standard(node, types, values, versions, opsets, ir_version)
    if node.op_type in _CONTRIB_AS_STANDARD and node.domain == "com.microsoft":
        twin = onnx.NodeProto()
        twin.CopyFrom(node)
        twin.domain, twin.op_type = "", _CONTRIB_AS_STANDARD[node.op_type]
        if twin.op_type == "MatMul":
            twin.input[:] = ["left", "right"]
            types = _operands(node, types)
        drop = _FUSED_ONLY | ({"transA", "transB"} if twin.op_type == "MatMul" else set())
        kept = [a for a in node.attribute if a.name not in drop or (a.name == "alpha" and twin.op_type == "Gemm")]
        del twin.attribute[:]
        twin.attribute.extend(kept)
        return _infer_standard(twin, types, values, versions, opsets, ir_version)
    if node.op_type in _FIRST_INPUT_SHAPE and node.input and node.input[0] in types and node.output:
        return {node.output[0]: types[node.input[0]]}
    return {}


def _operands(node: onnx.NodeProto, types: Types) -> Types:
    """Types of a matrix product's operands, transposed as its attributes say."""
    transposed = {a.name for a in node.attribute if a.name in ("transA", "transB") and a.i}
    operands: Types = {}
    for twin, flag, name in zip(("left", "right"), ("transA", "transB"), node.input, strict=False):
        kind = types.get(name, TypeProto())
        dims = dims_of(kind)
        if flag in transposed and dims is not None and len(dims) > 1:
            kind = tensor_type(kind.tensor_type.elem_type, (*dims[:-2], dims[-1], dims[-2]))
        operands[twin] = kind
    return operands


def _infer_standard(
    node: onnx.NodeProto,
    types: Types,
    values: Mapping[str, onnx.TensorProto],
    versions: Mapping[str, int],
    opsets: Sequence[onnx.OperatorSetIdProto],
    ir_version: int,
) -> Types:
    try:
        schema = onnx.defs.get_schema(node.op_type, versions.get("", 1), "")
        return dict(
            shape_inference.infer_node_outputs(
                schema,
                node,
                {name: types.get(name, TypeProto()) for name in node.input if name},
                {name: values[name] for name in node.input if name in values},
                opset_imports=list(opsets),
                ir_version=ir_version,
            )
        )
    except Exception:  # an unknown operator or a failed inference: the outputs stay unknown
        return {}


def _fold(
    node: onnx.NodeProto,
    types: Types,
    values: dict[str, onnx.TensorProto],
    opsets: Sequence[onnx.OperatorSetIdProto],
) -> None:
    """Evaluate a small computation on known values (parts of shape computations), and keep its result."""
    if node.op_type not in _FOLDED or node.domain not in ("", "ai.onnx") or len(node.output) != 1:
        return
    name = node.output[0]
    shape = dims_of(types.get(name))
    if shape is not None and int(np.prod([d if isinstance(d, int) else 0 for d in shape])) > _MAX_FOLDED:
        return
    result = _shape_of(node, types) if node.op_type == "Shape" else None
    if result is None:
        if node.op_type == "Shape" or any(n and n not in values for n in node.input):
            return
        result = _evaluate(node, values, opsets)
    if result is not None and result.size <= _MAX_FOLDED:
        values[name] = numpy_helper.from_array(result, name)
        types[name] = tensor_type(values[name].data_type, result.shape)


def _shape_of(node: onnx.NodeProto, types: Types) -> np.ndarray | None:
    dims = dims_of(types.get(node.input[0]))
    bounds: dict[str, int] = {a.name: a.i for a in node.attribute}
    if dims is None:
        return None
    chosen = dims[bounds.get("start", 0) : bounds.get("end", len(dims))]
    return np.array(chosen, dtype=np.int64) if all(isinstance(d, int) for d in chosen) else None


def _evaluate(
    node: onnx.NodeProto, values: Mapping[str, onnx.TensorProto], opsets: Sequence[onnx.OperatorSetIdProto]
) -> np.ndarray | None:
    from onnx.reference import ReferenceEvaluator

    inputs = [name for name in dict.fromkeys(node.input) if name]
    try:
        evaluate: Callable[..., Any] = ReferenceEvaluator(node, opsets={o.domain: o.version for o in opsets}).run
        result = evaluate(None, {name: numpy_helper.to_array(values[name]) for name in inputs})[0]
    except Exception:  # not covered by the reference: the value stays unknown
        return None
    return np.asarray(result)
