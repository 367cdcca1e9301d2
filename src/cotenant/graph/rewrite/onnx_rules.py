"""Row rules of ONNX operators, and of operators that onnxruntime's optimiser makes.

An operator without a rule counts as mixing rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from cotenant.graph.rewrite.einsum import einsum_maps
from cotenant.graph.rewrite.rows import (
    Axes,
    AxisMap,
    Extents,
    Measures,
    Mixes,
    Reshapes,
    Rule,
    aligned,
    batch_first,
    kept,
    matrix_product,
    nowhere,
    spread,
)

_END = 1 << 31
"""A slice that ends here or later ends with its axis."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node with the extents and known values of its tensors."""

    node: onnx.NodeProto
    extents: Mapping[str, Extents]
    values: Mapping[str, onnx.TensorProto]
    opset: int

    @property
    def count(self) -> int:
        """Number of inputs, omitted ones included."""
        return len(self.node.input)

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute, or its default if omitted."""
        found = next((each for each in self.node.attribute if each.name == name), None)
        return default if found is None else helper.get_attribute_value(found)

    def rank(self, place: int) -> int:
        """Number of axes of an input; 0 if omitted."""
        return self._rank(self.node.input[place]) if place < self.count and self.node.input[place] else 0

    @property
    def data_rank(self) -> int:
        """Number of axes of the first input. Raises _UnknownError for 0, onnxruntime's value for an unknown shape."""
        rank = self.rank(0)
        if not rank:
            raise _UnknownError(self.node.input[0])
        return rank

    @property
    def out_rank(self) -> int:
        """Number of axes of the first output."""
        return self._rank(self.node.output[0])

    def _rank(self, name: str) -> int:
        extents = self.extents.get(name)
        if extents is None:
            raise _UnknownError(name)
        return len(extents)

    def has(self, place: int) -> bool:
        """Whether an input is given."""
        return place < self.count and bool(self.node.input[place])

    def constant(self, place: int) -> list[int] | None:
        """Known integers in an input; None if it is omitted. Raises _UnknownError."""
        if not self.has(place):
            return None
        name = self.node.input[place]
        if name not in self.values:
            raise _UnknownError(name)
        return [int(each) for each in np.atleast_1d(numpy_helper.to_array(self.values[name]))]

    def numbers(self, name: str, place: int) -> list[int] | None:
        """Integers of an attribute, which newer operators take as an input."""
        given = self.attribute(name, None)
        if given is None:
            return self.constant(place)
        return [given] if isinstance(given, int) else list(given)


class _UnknownError(Exception):
    """A property of a tensor that a rule needs is unknown."""


def rule_of(view: NodeView) -> Rule:
    """The row rule of an operator."""
    make = _RULES.get(view.node.op_type)
    if make is None or view.node.domain not in ("", "ai.onnx", "com.microsoft", "com.microsoft.nchwc"):
        return Mixes("is not known to treat every row by itself")
    try:
        return make(view)
    except _UnknownError as error:
        return Mixes(f"has {str(error)!r}, of which too little is known")


def _all(view: NodeView, *maps: AxisMap) -> Axes:
    """The same maps for all outputs; further inputs have no rows."""
    rest = [nowhere(view.rank(place)) for place in range(len(maps), view.count)]
    return Axes(((*maps, *rest),))


def _pointwise(view: NodeView) -> Rule:
    whole = view.out_rank
    return spread(*(aligned(view.rank(place), whole) for place in range(view.count)))


def _first_kept(view: NodeView, over: Sequence[int], *, removed: bool = False) -> Rule:
    return _all(view, kept(view.rank(0), over, removed=removed))


def _softmax(view: NodeView) -> Rule:
    rank = view.data_rank
    axis = view.attribute("axis", -1 if view.opset >= 13 else 1) % rank
    return _first_kept(view, (axis,) if view.opset >= 13 else range(axis, rank))


def _from_axis(view: NodeView) -> Rule:
    """Layer normalisations: over an axis and the axes after it."""
    rank = view.data_rank
    return _first_kept(view, range(view.attribute("axis", -1) % rank, rank))


def _reduce(view: NodeView) -> Rule:
    axes = view.numbers("axes", 1)
    if not axes:
        axes = [] if view.attribute("noop_with_empty_axes", 0) else list(range(view.rank(0)))
    return _first_kept(view, axes, removed=not view.attribute("keepdims", 1))


def _arg(view: NodeView) -> Rule:
    return _first_kept(view, (view.attribute("axis", 0),), removed=not view.attribute("keepdims", 1))


def _along(default: int, place: int | None = None) -> Callable[[NodeView], Rule]:
    """Over one axis, given by an attribute or the input at `place`."""

    def rule(view: NodeView) -> Rule:
        given = view.numbers("axis", place if place is not None else view.count)
        return _first_kept(view, (given or [default])[:1])

    return rule


def _concat(view: NodeView) -> Rule:
    axis = view.attribute("axis", 1)
    return Axes((tuple(kept(view.rank(place), (axis,)) for place in range(view.count)),))


def _transpose(view: NodeView) -> Rule:
    rank = view.data_rank
    order = list(view.attribute("perm", range(rank - 1, -1, -1)))
    return _all(view, tuple(order.index(axis) for axis in range(rank)))


def _slice(view: NodeView) -> Rule:
    rank = view.data_rank
    if view.attribute("starts", None) is not None:
        starts, ends = list(view.attribute("starts", [])), list(view.attribute("ends", []))
        axes, steps = list(view.attribute("axes", range(len(starts)))), [1] * len(starts)
    else:
        starts, ends = view.constant(1) or [], view.constant(2) or []
        axes = view.constant(3) or list(range(len(starts)))
        steps = view.constant(4) or [1] * len(starts)
    cut = [axis for axis, a, b, by in zip(axes, starts, ends, steps, strict=True) if a or b < _END - 1 or by != 1]
    return _all(view, kept(rank, cut))


def _pad(view: NodeView) -> Rule:
    rank = view.data_rank
    pads = view.numbers("pads", 1) or []
    axes = [axis % rank for axis in view.constant(3) or range(rank)]
    cut = [axis for at, axis in enumerate(axes) if pads[at] or pads[at + len(axes)]]
    return _all(view, kept(rank, cut))


def _tile(view: NodeView) -> Rule:
    return Axes(((kept(view.rank(0)), nowhere(1)),), fills=True)


def _expand(view: NodeView) -> Rule:
    return Axes(((aligned(view.rank(0), view.out_rank), nowhere(1)),), fills=True)


def _gather(view: NodeView) -> Rule:
    data, picked = view.data_rank, view.rank(1)
    axis = view.attribute("axis", 0) % data
    map_data = tuple(at if at < axis else None if at == axis else at - 1 + picked for at in range(data))
    return _all(view, map_data, tuple(axis + at for at in range(picked)))


def _gather_elements(view: NodeView) -> Rule:
    axis = view.attribute("axis", 0)
    return Axes((tuple(kept(view.rank(place), (axis,)) for place in range(view.count)),))


def _gather_nd(view: NodeView) -> Rule:
    shared = view.attribute("batch_dims", 0)
    return _all(view, kept(view.rank(0), range(shared, view.rank(0))), kept(view.rank(1), (-1,)))


def _one_hot(view: NodeView) -> Rule:
    rank = view.rank(0)
    axis = view.attribute("axis", -1) % (rank + 1)
    return _all(view, tuple(at + (at >= axis) for at in range(rank)))


def _matmul(left: int = 0, right: int = 1) -> Callable[[NodeView], Rule]:
    def rule(view: NodeView) -> Rule:
        if view.attribute("transBatchA", 0) or view.attribute("transBatchB", 0):
            return Mixes("turns the axes of its batch")
        turned = bool(view.attribute("transA", 0)), bool(view.attribute("transB", 0))
        sides = matrix_product(view.rank(left), view.rank(right), turned)
        maps = [nowhere(view.rank(place)) for place in range(view.count)]
        maps[left], maps[right] = sides
        return spread(*maps)

    return rule


def _gemm(view: NodeView) -> Rule:
    turned = bool(view.attribute("transA", 0)), bool(view.attribute("transB", 0))
    return spread(*matrix_product(2, 2, turned), aligned(view.rank(2), 2))


def _einsum(view: NodeView) -> Rule:
    maps = einsum_maps(view.attribute("equation", b"").decode(), [view.rank(place) for place in range(view.count)])
    return Mixes("has an equation with dots") if maps is None else spread(*maps)


def _batched(*data: int, broadcasts: Sequence[int] = (), if_more: str = "") -> Callable[[NodeView], Rule]:
    """Rows are along axis 0 of these inputs; others are weights. `if_more`: why several outputs would mix rows."""

    def rule(view: NodeView) -> Rule:
        if if_more and any(view.node.output[1:]):
            return Mixes(if_more)
        maps = (batch_first if place in data else nowhere for place in range(view.count))
        found = tuple(make(view.rank(place)) for place, make in enumerate(maps))
        return Axes((found,), broadcasts=frozenset(broadcasts))

    return rule


def _batch_norm(view: NodeView) -> Rule:
    if view.attribute("training_mode", 0) or len(view.node.output) > 1:
        return Mixes("normalises over the rows: it is in training mode")
    return _batched(0)(view)


def _dropout(view: NodeView) -> Rule:
    if view.has(2) and view.constant(2) != [0]:
        return Mixes("draws random numbers: it is in training mode")
    return _first_kept(view, ())


def _recurrent(view: NodeView) -> Rule:
    if view.attribute("layout", 0):
        one = _batched(0, 4, 5, 6)(view)
        assert isinstance(one, Axes)
        return one
    across = [nowhere(view.rank(place)) for place in range(view.count)]

    def at(axis: int) -> tuple[AxisMap, ...]:
        maps = list(across)
        for place, own in ((0, 1), (4, 0), (5, 1), (6, 1)):
            if view.has(place):
                maps[place] = tuple(axis if each == own else None for each in range(view.rank(place)))
        return tuple(maps)

    return Axes((at(2), at(1)))


def _quantise(view: NodeView) -> Rule:
    rank = view.rank(0)
    over = (view.attribute("axis", 1),) if view.rank(1) else ()
    return _first_kept(view, over if rank else ())


def _reverse(view: NodeView) -> Rule:
    batch, time = view.attribute("batch_axis", 1), view.attribute("time_axis", 0)
    return _all(view, kept(view.rank(0), (time,)), (batch,))


def _nothing(view: NodeView) -> Rule:
    """For inputs without rows."""
    return _all(view)


def _mixes(why: str) -> Callable[[NodeView], Rule]:
    return lambda _: Mixes(why)


def _table() -> dict[str, Callable[[NodeView], Rule]]:
    rows_found = "gives as many as it finds among all rows"
    groups: tuple[tuple[Callable[[NodeView], Rule], str], ...] = (
        (
            _pointwise,
            "Abs Acos Acosh Add And Asin Asinh Atan Atanh BiasAdd BiasGelu BitShift BitwiseAnd BitwiseNot BitwiseOr "
            "BitwiseXor Cast CastLike Ceil Celu Clip Constant Cos Cosh Div Elu Equal Erf Exp FastGelu Floor Gelu "
            "Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean "
            "Min Mish Mod Mul Neg Not Or PRelu Pow QLinearAdd QLinearLeakyRelu QLinearMul QLinearSigmoid QuickGelu "
            "Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh "
            "ThresholdedRelu Where Xor",
        ),
        (lambda _: Reshapes(), "Flatten Reshape Squeeze Unsqueeze"),
        (lambda _: Measures(), "Shape Size"),
        (_softmax, "Softmax LogSoftmax Hardmax"),
        (_from_axis, "LayerNormalization RMSNormalization SimplifiedLayerNormalization"),
        (
            _reduce,
            "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
            "ReduceSumSquare",
        ),
        (_arg, "ArgMax ArgMin"),
        (_along(-1), "TopK LpNormalization"),
        (_along(0), "Split"),
        (_along(0, 1), "CumSum"),
        (_concat, "Concat"),
        (_transpose, "Transpose"),
        (_slice, "Slice"),
        (_pad, "Pad"),
        (_tile, "Tile"),
        (_expand, "Expand"),
        (
            lambda view: Axes((tuple(nowhere(view.rank(at)) for at in range(view.count)),), fills=True),
            "ConstantOfShape",
        ),
        (_gather, "Gather"),
        (_gather_elements, "GatherElements ScatterElements"),
        (_gather_nd, "GatherND"),
        (_one_hot, "OneHot"),
        (_matmul(), "MatMul MatMulInteger MatMulIntegerToFloat FusedMatMul TransposeMatMul MatMulNBits"),
        (_matmul(0, 3), "QLinearMatMul"),
        (_gemm, "Gemm FusedGemm"),
        (_einsum, "Einsum"),
        (lambda view: _first_kept(view, (-2, -1)), "Trilu"),
        (_reverse, "ReverseSequence"),
        (_quantise, "QuantizeLinear DequantizeLinear"),
        (_recurrent, "LSTM GRU RNN"),
        (_batch_norm, "BatchNormalization"),
        (_dropout, "Dropout"),
        (
            _batched(0),
            "AveragePool ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNorm "
            "GroupNormalization InstanceNormalization LRN LpPool QLinearAveragePool QLinearConv "
            "QLinearGlobalAveragePool ReorderInput ReorderOutput Resize SpaceToDepth Upsample",
        ),
        (_batched(0, 3), "Conv FusedConv"),
        (_batched(0, if_more="gives indices, which count over all rows"), "MaxPool"),
        (_mixes("takes indices, which count over all rows"), "MaxUnpool"),
        (_batched(0, 1), "GridSample"),
        (_batched(0, 1, broadcasts=(1,)), "SkipLayerNormalization SkipSimplifiedLayerNormalization"),
        (_batched(0, 1, 7, 8, broadcasts=(7, 8)), "EmbedLayerNormalization"),
        (_batched(0, 3, broadcasts=(3,)), "Attention"),
        (_batched(0, 1, 2, 4, broadcasts=(4,)), "MultiHeadAttention"),
        (
            _mixes("draws random numbers"),
            "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
        ),
        (
            _mixes("scales by the range of all rows"),
            "DynamicQuantizeLinear DynamicQuantizeLSTM DynamicQuantizeMatMul MeanVarianceNormalization",
        ),
        (_mixes(rows_found), "Compress NonMaxSuppression NonZero Unique"),
        (_nothing, "EyeLike Range"),
        (_mixes("takes boxes of any rows"), "MaxRoiPool RoiAlign ScatterND"),
        (_mixes("has a graph of its own"), "If Loop Scan SequenceMap"),
    )
    return {name: rule for rule, names in groups for name in names.split()}


_RULES = _table()
SIZES = {
    "Reshape": frozenset((1,)),
    "Expand": frozenset((1,)),
    "ConstantOfShape": frozenset((0,)),
    "Tile": frozenset((1,)),
    "Resize": frozenset((3,)),
}
"""Positions of inputs that give a shape, which an operator adapts to the number of its rows."""
