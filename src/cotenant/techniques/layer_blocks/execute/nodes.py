"""Lowering of ONNX operators to compiled kernels, unit by unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx
from onnx import helper

from cotenant.graph.dfg import Dfg
from cotenant.techniques.layer_blocks.compile.problem import NONE, Activation

Kind = Literal["conv", "product", "pool", "mean", "apply", "add", "multiply", "scale", "concat", "flat"]
HEAVY = ("conv", "product")
_FLOAT_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class KernelNode:
    """An operation of kernels, with tensors by name. `inputs` has the added tensor last, if there is one.

    `weights` and `bias` name constants; with `turned` a product's weights are [filters, channels]. `pads` are above,
    left, below, right. `mode` of pooling: 0 maximum, 1 mean without padding, 2 mean with padding.
    """

    kind: Kind
    inputs: tuple[str, ...]
    output: str
    weights: str = ""
    bias: str = ""
    turned: bool = False
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    groups: int = 1
    mode: int = 0
    activation: Activation = NONE
    adds: bool = False


Shapes = Callable[[str], tuple[int, ...] | None]
"""The shape of an FP32 tensor by name; None for other tensors, and for open dimensions."""


def shapes_of(dfg: Dfg, *, is_open: bool = False) -> Shapes:
    """Shapes of FP32 tensors in a graph; with `is_open`, open dimensions count as 1."""

    def shape(name: str) -> tuple[int, ...] | None:
        tensor = dfg.tensors.get(name)
        if tensor is None or tensor.dtype != "tensor(float)" or tensor.shape is None:
            return None
        if not is_open and any(not isinstance(each, int) for each in tensor.shape):
            return None
        return tuple(each if isinstance(each, int) else 1 for each in tensor.shape)

    return shape


class Lowering:
    """Lowers the operators of one graph. `constants` are its small constants by name, and the shapes of all."""

    def __init__(self, nodes: Mapping[str, onnx.NodeProto], constants: Mapping[str, Any]) -> None:
        self._nodes = nodes
        self._constants = constants

    def unit(self, dfg: Dfg, unit: int, shape: Shapes) -> tuple[KernelNode, ...] | None:
        """The nodes of a unit with fused activations and sums; None if kernels cannot run one of its operators."""
        wanted = set(dfg.units[unit].outputs)
        uses: dict[str, int] = {}
        for position in dfg.units[unit].operators:
            for name in dfg.operators[position].inputs:
                uses[name] = uses.get(name, 0) + 1
        made: list[KernelNode] = []
        for position in dfg.units[unit].operators:
            operator = dfg.operators[position]
            node = self.operator(self._nodes[operator.outputs[0]], shape) if len(operator.outputs) == 1 else None
            if node is None:
                return None
            if _fused(made, node, lambda name: uses.get(name) == 1 and name not in wanted):
                continue
            if node.kind == "apply" and node.bias:
                return None
            made.append(node)
        return tuple(made)

    def groups(self, dfg: Dfg, shape: Shapes) -> list[list[int]]:
        """Operators by unit; a unit with operators that kernels cannot run is split around its convolutions and
        products."""
        groups: list[list[int]] = []
        for unit in dfg.units:
            runs: list[tuple[bool, list[int]]] = []
            for position in unit.operators:
                operator = dfg.operators[position]
                node = self.operator(self._nodes[operator.outputs[0]], shape) if len(operator.outputs) == 1 else None
                is_ours = node is not None and (node.kind in HEAVY or bool(runs and runs[-1][0]))
                if runs and runs[-1][0] == is_ours:
                    runs[-1][1].append(position)
                else:
                    runs.append((is_ours, [position]))
            whole = self.unit(dfg, unit.index, shape) is not None
            groups += [list(unit.operators)] if whole else [run for _, run in runs]
        return groups

    def certain(self, dfg: Dfg, shape: Shapes) -> Shapes:
        """The shapes that onnxruntime agrees with: None for tensors behind a pool that it counts differently.

        With `ceil_mode`, ONNX shape inference counts a last window that starts in the padding; onnxruntime does not.
        """
        unsure: set[str] = set()
        for operator in dfg.operators:
            nodes = (self._nodes.get(name) for name in operator.outputs)
            node = next((each for each in nodes if each is not None), None)
            is_unsure = node is not None and _is_counted_otherwise(node, shape)
            if is_unsure or not unsure.isdisjoint(operator.inputs):
                unsure.update(operator.outputs)
        return lambda name: None if name in unsure else shape(name)

    def operator(self, node: onnx.NodeProto, shape: Shapes) -> KernelNode | None:
        """The node of an operator, or None."""
        found = _BY_TYPE.get(node.op_type)
        if found is None or node.domain not in ("", "ai.onnx", "com.microsoft"):
            return None
        given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        return found(self, node, given, shape)

    def _weights(self, name: str) -> tuple[int, ...] | None:
        """Shape of a constant."""
        held = self._constants.get(name)
        return None if held is None else tuple(held.shape)

    def _convolution(self, node: onnx.NodeProto, given: dict[str, Any], shape: Shapes) -> KernelNode | None:
        inputs = [*node.input, "", "", ""]
        source, filters = shape(inputs[0]), self._weights(inputs[1])
        if source is None or filters is None or len(source) != 4 or len(filters) != 4:
            return None
        if given.get("auto_pad", b"NOTSET") != b"NOTSET":
            return None
        if inputs[2] and self._weights(inputs[2]) is None:
            return None
        activation = _activation(given.get("activation", b"").decode(), given.get("activation_params", ()))
        if activation is None or (inputs[3] and shape(inputs[3]) != shape(node.output[0])):
            return None
        pads = given.get("pads", (0, 0, 0, 0))
        stride = given.get("strides", (1, 1))
        dilation = given.get("dilations", (1, 1))
        return KernelNode(
            "conv",
            (inputs[0], inputs[3]) if inputs[3] else (inputs[0],),
            node.output[0],
            inputs[1],
            inputs[2],
            False,
            (filters[2], filters[3]),
            (stride[0], stride[1]),
            (dilation[0], dilation[1]),
            (pads[0], pads[1], pads[2], pads[3]),
            given.get("group", 1),
            activation=activation,
            adds=bool(inputs[3]),
        )

    def _product(self, node: onnx.NodeProto, given: dict[str, Any], shape: Shapes) -> KernelNode | None:
        inputs = [*node.input, ""]
        source, matrix = shape(inputs[0]), self._weights(inputs[1])
        if source is None or matrix is None or len(matrix) != 2 or len(source) < 2:
            return None
        is_gemm = node.op_type in ("Gemm", "FusedGemm")
        if given.get("transA") or given.get("transBatchA") or given.get("transBatchB"):
            return None
        if given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0 or (is_gemm and len(source) != 2):
            return None
        turned = bool(given.get("transB"))
        bias = inputs[2] if is_gemm else ""
        if bias and self._weights(bias) != (matrix[0 if turned else 1],):
            return None
        activation = _activation(given.get("activation", b"").decode(), [given.get("activation_alpha", 0.01)])
        if activation is None:
            return None
        return KernelNode("product", (inputs[0],), node.output[0], inputs[1], bias, turned, activation=activation)

    def _pool(self, node: onnx.NodeProto, given: dict[str, Any], shape: Shapes) -> KernelNode | None:
        source, made = shape(node.input[0]), shape(node.output[0])
        if source is None or made is None or len(source) != 4 or len(node.output) != 1:
            return None
        if given.get("auto_pad", b"NOTSET") != b"NOTSET" or any(each != 1 for each in given.get("dilations", ())):
            return None
        kernel, stride, pads = given["kernel_shape"], given.get("strides", (1, 1)), given.get("pads", (0, 0, 0, 0))
        mode = 0 if node.op_type == "MaxPool" else 1 + bool(given.get("count_include_pad"))
        for axis in (0, 1):  # no window may lie in the padding alone, and padding counts only inside the border
            last = (made[axis + 2] - 1) * stride[axis] - pads[axis]
            if last >= source[axis + 2] or kernel[axis] <= pads[axis]:
                return None
            if mode == 2 and last + kernel[axis] > source[axis + 2] + pads[axis + 2]:
                return None
        whole = (pads[0], pads[1], pads[2], pads[3])
        sizes = (kernel[0], kernel[1]), (stride[0], stride[1])
        return KernelNode("pool", (node.input[0],), node.output[0], "", "", False, *sizes, pads=whole, mode=mode)

    def _mean(self, node: onnx.NodeProto, given: dict[str, Any], shape: Shapes) -> KernelNode | None:
        source = shape(node.input[0])
        axes = given.get("axes")
        if axes is None and len(node.input) > 1:
            held = self._constants.get(node.input[1])
            axes = None if held is None else held.ravel().tolist()
        if node.op_type == "GlobalAveragePool":
            axes = (2, 3)
        if source is None or len(source) != 4 or axes is None or sorted(axis % 4 for axis in axes) != [2, 3]:
            return None
        return KernelNode("mean", (node.input[0],), node.output[0])

    def _apply(self, node: onnx.NodeProto, given: dict[str, Any], shape: Shapes) -> KernelNode | None:
        source = shape(node.input[0])
        kind = node.op_type
        parameters: Sequence[float] = ()
        if kind == "Clip":
            bounds = [given.get("min", -_FLOAT_MAX), given.get("max", _FLOAT_MAX)]
            for at, name in enumerate(node.input[1:]):
                held = self._constants.get(name)
                if not name:
                    continue
                if held is None or held.size != 1:
                    return None
                bounds[at] = float(held.item())
            parameters = bounds
        elif kind in ("LeakyRelu", "QuickGelu"):
            parameters = (given.get("alpha", 0.01 if kind == "LeakyRelu" else 1.702),)
        elif kind == "HardSigmoid":
            parameters = (given.get("alpha", 0.2), given.get("beta", 0.5))
        elif kind == "Gelu" and given.get("approximate", b"none") != b"none":
            return None
        activation = _activation(kind, parameters)
        if source is None or len(source) != 4 or activation is None:
            return None
        return KernelNode("apply", (node.input[0],), node.output[0], activation=activation)

    def _sum(self, node: onnx.NodeProto, _: dict[str, Any], shape: Shapes) -> KernelNode | None:
        first, second = (shape(name) for name in node.input)
        is_added = node.op_type == "Add" and first is not None and second is None
        if is_added and self._weights(node.input[1]) == self._bias_of(node.input[0], first):  # it must be fused
            return KernelNode("apply", (node.input[0],), node.output[0], bias=node.input[1])
        if first is None or second is None or len(first) != 4 or len(second) != 4:
            return None
        if first == second:
            return KernelNode("add" if node.op_type == "Add" else "multiply", tuple(node.input), node.output[0])
        if node.op_type == "Mul":
            for source, factor in ((0, 1), (1, 0)):
                wide, narrow = (first, second) if source == 0 else (second, first)
                if narrow == (*wide[:2], 1, 1):
                    return KernelNode("scale", (node.input[source], node.input[factor]), node.output[0])
        return None

    def _bias_of(self, name: str, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """The shape of a bias for the operator that makes this tensor: one number per filter, or per column."""
        if shape is None:
            return None
        maker = self._nodes.get(name)
        is_convolution = maker is not None and _BY_TYPE.get(maker.op_type) is Lowering._convolution
        return (shape[1], 1, 1) if is_convolution else shape[-1:]

    def _concat(self, node: onnx.NodeProto, given: dict[str, Any], shape: Shapes) -> KernelNode | None:
        shapes = [shape(name) for name in node.input]
        if given.get("axis") != 1 or any(each is None or len(each) != 4 for each in shapes):
            return None
        return KernelNode("concat", tuple(node.input), node.output[0])

    def _flat(self, node: onnx.NodeProto, given: dict[str, Any], shape: Shapes) -> KernelNode | None:
        source, made = shape(node.input[0]), shape(node.output[0])
        if source is None or made is None or len(source) != 4:
            return None
        flat = (source[0], source[1] * source[2] * source[3])
        return KernelNode("flat", (node.input[0],), node.output[0]) if made == flat else None


def _is_counted_otherwise(node: onnx.NodeProto, shape: Shapes) -> bool:
    """Whether a pool's last window in ONNX starts in the padding; also True if its shapes are unknown."""
    given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if not given.get("ceil_mode"):
        return False
    source, made = shape(node.input[0]), shape(node.output[0])
    if source is None or made is None:
        return True
    axes = range(len(given["kernel_shape"]))
    stride, pads = given.get("strides", [1] * len(axes)), given.get("pads", [0] * 2 * len(axes))
    return any((made[at + 2] - 1) * stride[at] - pads[at] >= source[at + 2] for at in axes)


_BY_TYPE: dict[str, Callable[[Lowering, onnx.NodeProto, dict[str, Any], Shapes], KernelNode | None]] = {
    **dict.fromkeys(("Conv", "FusedConv"), Lowering._convolution),
    **dict.fromkeys(("Gemm", "FusedGemm", "MatMul", "FusedMatMul"), Lowering._product),
    **dict.fromkeys(("MaxPool", "AveragePool"), Lowering._pool),
    **dict.fromkeys(("GlobalAveragePool", "ReduceMean"), Lowering._mean),
    **dict.fromkeys(
        ("Relu", "Clip", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "QuickGelu", "Gelu"),
        Lowering._apply,
    ),
    **dict.fromkeys(("Add", "Mul"), Lowering._sum),
    "Concat": Lowering._concat,
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze"), Lowering._flat),
}
_ACTIVATION_NAMES = {
    "": "",
    "Relu": "relu",
    "Clip": "clip",
    "LeakyRelu": "leaky",
    "Sigmoid": "sigmoid",
    "HardSigmoid": "hard_sigmoid",
    "HardSwish": "hard_swish",
    "Tanh": "tanh",
    "QuickGelu": "silu",
    "Gelu": "gelu",
}


def _activation(name: str, parameters: Sequence[float]) -> Activation | None:
    kind = _ACTIVATION_NAMES.get(name)
    if kind is None:
        return None
    count = {"clip": 2, "leaky": 1, "silu": 1, "hard_sigmoid": 2}.get(kind, 0)
    if len(parameters) < count:
        return None
    given: list[float | None] = [float(each) for each in parameters[:count]]
    if kind == "clip":
        given = [None if each == side else each for each, side in zip(given, (-math.inf, math.inf), strict=True)]
    if any(each is not None and not math.isfinite(each) for each in given):
        return None
    return Activation(kind, tuple(given))


def _fused(made: list[KernelNode], node: KernelNode, is_inner: Callable[[str], bool]) -> bool:
    """Whether a node was fused into an earlier one: a bias, a sum or an activation of a tensor with no other reader."""
    for at in range(len(made) - 1, -1, -1):
        before = made[at]
        if before.kind not in HEAVY or before.output not in node.inputs or not is_inner(before.output):
            continue
        if before.activation != NONE:
            return False
        if node.bias and not before.bias and not before.adds:
            made[at] = replace(before, bias=node.bias, output=node.output)
            return True
        if node.kind == "apply" and not node.bias:
            made[at] = replace(before, activation=node.activation, output=node.output)
            return True
        if node.kind == "add" and not before.adds and before.kind == "conv":
            other = next((name for name in node.inputs if name != before.output), "")
            if not other or any(other == later.output for later in made[at:]):
                return False
            made[at] = replace(before, inputs=(*before.inputs, other), adds=True, output=node.output)
            return True
        return False
    return False
