"""Fuses operators into units.

A light operator (elementwise, normalisation, reshape...) joins the producer of its input if it is the only consumer.
Light operators before a heavy one join it if it is their only consumer. Each merge contracts an edge from a source
without other consumers, so the contracted graph stays acyclic. Units are ordered by their last operator, which keeps
the topological order. Every boundary between units is therefore a valid cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cotenant.graph.dfg import Operator


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LIGHT = _names(
    """
    Abs Add And BatchNormalization BiasAdd BiasGelu BiasSoftmax Cast CastLike Ceil Celu Clip ConstantOfShape Cos
    Constant DequantizeLinear Div Dropout DynamicQuantizeLinear Elu Equal Erf Exp Expand FastGelu Flatten Floor Gelu
    GreaterOrEqual Greater GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization IsNaN
    LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Max Min Mish Mod Mul Neg Not Or PRelu Pad Pow
    QLinearAdd QLinearLeakyRelu QLinearMul QLinearSigmoid QuantizeLinear QuickGelu RMSNormalization Range Reciprocal
    Relu ReorderInput ReorderOutput Reshape Round Selu Shape Sigmoid Sign SimplifiedLayerNormalization Sin Size
    SkipLayerNormalization SkipSimplifiedLayerNormalization Slice Softmax Softplus Softsign Sqrt Squeeze Sub Swish Tanh
    ThresholdedRelu Tile Transpose Unsqueeze Where Xor
    """
)
"""Operators with a small cost beside a convolution or matrix product."""


def fuse(operators: Sequence[Operator], outputs: Collection[str]) -> list[list[int]]:
    """Group `operators` (in topological order) into units; returns the members of each unit, in execution order.

    `outputs` are the graph's outputs: an operator that makes one always ends its unit.
    """
    kept = set(outputs)
    producer = {name: op.index for op in operators for name in op.outputs}
    consumers: dict[int, set[int]] = {op.index: set() for op in operators}
    for op in operators:
        for name in op.inputs:
            if name in producer:
                consumers[producer[name]].add(op.index)
    sole = {
        op.index for op in operators if len(consumers[op.index]) == 1 and not any(name in kept for name in op.outputs)
    }
    members: dict[int, list[int]] = {}  # keyed by the last operator of each group
    heavy: dict[int, bool] = {}
    for op in operators:
        is_heavy = op.op_type not in LIGHT
        mine = [op.index]
        sources = sorted({producer[name] for name in op.inputs if name in producer}, reverse=True)
        for source in sources:
            if source not in sole or (is_heavy and heavy[source]):
                continue
            mine = members.pop(source) + mine
            is_heavy = is_heavy or heavy[source]
        members[op.index] = sorted(mine)
        heavy[op.index] = is_heavy
    return [members[last] for last in sorted(members)]


def merge_across(
    operators: Sequence[Operator], groups: Sequence[Sequence[int]], sealed: Collection[str]
) -> list[list[int]]:
    """Join units so that no tensor of `sealed` (tensors that cannot be passed on) crosses a boundary."""
    home = {name: g for g, group in enumerate(groups) for position in group for name in operators[position].outputs}
    reach = list(range(len(groups)))
    for g, group in enumerate(groups):
        for position in group:
            for name in operators[position].inputs:
                if name in sealed and name in home:
                    reach[home[name]] = max(reach[home[name]], g)
    merged: list[list[int]] = []
    until = -1
    for g, group in enumerate(groups):
        if g <= until:
            merged[-1].extend(group)
        else:
            merged.append(list(group))
        until = max(until, reach[g])
    return merged
