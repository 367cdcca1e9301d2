"""Multiply-accumulates (MACs) of an operator from its shapes and attributes. Pure functions, no onnx."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...] | None
"""Sizes of a tensor's dimensions; None when one of them is unknown."""


@dataclass(frozen=True, slots=True)
class CostedNode:
    """The inputs of the rules: operator type, attributes (integers, strings, floats), and shapes by position.

    An omitted optional input has the shape None.
    """

    op_type: str
    attributes: Mapping[str, object]
    inputs: Sequence[Shape]
    outputs: Sequence[Shape]

    def input(self, position: int) -> tuple[int, ...]:
        """Shape of input `position`; raises LookupError when it is unknown or omitted."""
        return _known(self.inputs, position)

    def output(self, position: int = 0) -> tuple[int, ...]:
        """Shape of output `position`; raises LookupError when it is unknown or omitted."""
        return _known(self.outputs, position)

    def number(self, name: str, default: int = 0) -> int:
        """Integer attribute `name`."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, int) else default


def _known(shapes: Sequence[Shape], position: int) -> tuple[int, ...]:
    shape = shapes[position] if position < len(shapes) else None
    if shape is None:
        raise LookupError(position)
    return shape


def count_macs(node: CostedNode) -> int | None:
    """MACs of one run of `node`; None when a required shape is unknown.

    Operators without products (elementwise, pooling, data movement) count 0: their cost is their bytes.
    """
    rule = _RULES.get(node.op_type)
    if rule is None:
        return 0
    try:
        return rule(node)
    except (LookupError, ZeroDivisionError):
        return None


def _convolution(weight: int) -> Callable[[CostedNode], int]:
    def macs(node: CostedNode) -> int:
        kernel = node.input(weight)
        return prod(node.output()) * prod(kernel) // kernel[0]

    return macs


def _transposed_convolution(node: CostedNode) -> int:
    kernel = node.input(1)
    return prod(node.input(0)) * prod(kernel) // kernel[0]


def _product(left: int, transpose: str = "transA") -> Callable[[CostedNode], int]:
    def macs(node: CostedNode) -> int:
        shape = node.input(left)
        depth = shape[-2] if node.number(transpose) and len(shape) > 1 else shape[-1]
        return prod(node.output()) * depth

    return macs


def _blocked_product(node: CostedNode) -> int:
    return prod(node.output()) * node.number("K")


def _recurrent(weight: int, recurrence: int, sequence_axis: int) -> Callable[[CostedNode], int]:
    def macs(node: CostedNode) -> int:
        steps, batch = node.input(0)[:2] if sequence_axis == 0 else node.input(0)[1::-1]
        return steps * batch * (prod(node.input(weight)) + prod(node.input(recurrence)))

    return macs


def _recurrent_onnx(node: CostedNode) -> int:
    return _recurrent(1, 2, node.number("layout"))(node)


def _packed_attention(node: CostedNode) -> int:
    """com.microsoft Attention: input (B, S, D), weight (D, total width of q, k and v)."""
    batch, length, _ = node.input(0)
    projection = prod(node.input(0)) * node.input(1)[-1]
    return projection + 2 * batch * length * length * node.output()[-1]


def _attention(node: CostedNode) -> int:
    """Scores and weighted sum for query (B, S, D) or (B, H, S, d) and T keys."""
    query, key = node.input(0), node.input(1)
    return 2 * prod(query) * key[-2]


def _einsum(node: CostedNode) -> int:
    equation = node.attributes.get("equation", "")
    terms = str(equation).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for position, term in enumerate(terms):
        if "." in term:
            raise LookupError(position)
        sizes.update(zip(term, node.input(position), strict=False))
    return prod(sizes.values()) if len(terms) > 1 else 0


_RULES: dict[str, Callable[[CostedNode], int]] = {
    "Conv": _convolution(1),
    "FusedConv": _convolution(1),
    "NhwcFusedConv": _convolution(1),
    "NhwcConv": _convolution(1),
    "ConvInteger": _convolution(1),
    "DeformConv": _convolution(1),
    "QLinearConv": _convolution(3),
    "ConvTranspose": _transposed_convolution,
    "Gemm": _product(0),
    "FusedGemm": _product(0),
    "MatMul": _product(0),
    "MatMulInteger": _product(0),
    "MatMulIntegerToFloat": _product(0),
    "DynamicQuantizeMatMul": _product(0),
    "FusedMatMul": _product(0),
    "FusedMatMulActivation": _product(0),
    "TransposeMatMul": _product(0),
    "QLinearMatMul": _product(0),
    "QGemm": _product(0),
    "MatMulNBits": _blocked_product,
    "Einsum": _einsum,
    "LSTM": _recurrent_onnx,
    "GRU": _recurrent_onnx,
    "RNN": _recurrent_onnx,
    "DynamicQuantizeLSTM": _recurrent(1, 2, 0),
    "Attention": _attention,
    "MultiHeadAttention": _attention,
    "PackedAttention": _packed_attention,
    "QAttention": _packed_attention,
}


def rule_name(op_type: str, domain: str) -> str:
    """Name of an operator in `count_macs`: two domains have an operator Attention."""
    return "PackedAttention" if (op_type, domain) == ("Attention", "com.microsoft") else op_type
