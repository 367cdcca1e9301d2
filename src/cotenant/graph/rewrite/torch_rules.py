"""Row rules of torch's operators.

An operator without a rule counts as mixing rows, unless torch tags it as pointwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cotenant.graph.rewrite.einsum import einsum_maps
from cotenant.graph.rewrite.rows import (
    Axes,
    AxisMap,
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
from cotenant.graph.torch import TorchGraph, is_size
from cotenant.graph.torch_lower import aten_name, is_tensor
from cotenant.graph.torch_sizes import Sizes

_END = 1 << 31
"""A slice that ends here or later ends with its axis."""


class _UnknownError(Exception):
    """A property of an operator that a rule needs is unknown."""


@dataclass(frozen=True, slots=True)
class AtenView:
    """An operator with the sizes of its tensors."""

    node: fx.Node
    graph: TorchGraph
    probes: Sequence[Sizes]

    @property
    def given(self) -> dict[str, Any]:
        """All arguments by their names in the schema, with defaults."""
        target: Any = self.node.target
        expected = target._schema.arguments
        named = {each.name: each.default_value for each in expected}
        named |= {each.name: value for each, value in zip(expected, self.node.args, strict=False)}
        return {**named, **self.node.kwargs}

    @property
    def tensors(self) -> list[fx.Node]:
        """The tensors among its arguments, in order."""
        return [node for node in self.node.all_input_nodes if is_tensor(node)]

    def rank(self, node: Any) -> int:
        """Number of axes of a tensor."""
        return int(node.meta["val"].ndim)

    @property
    def out_rank(self) -> int:
        """Number of axes of the first output."""
        return self.rank(self.graph.made[self.node][0])

    @property
    def counts_rows(self) -> bool:
        """Whether a number among its arguments depends on the number of rows."""
        for node in self.node.all_input_nodes:
            if is_size(self.graph, node):
                sizes = [probe.size(node.meta["val"]) for probe in self.probes]
                if sizes[0] is None or sizes[0] != sizes[1]:
                    return True
        return False


_Made = tuple[Rule, Sequence[Any]]
"""A rule, and the tensors of its maps, by position."""


def aten_rule_of(view: AtenView) -> _Made:
    """The row rule of an operator."""
    target: Any = view.node.target
    if not isinstance(target, torch._ops.OpOverload):
        return Mixes("has a graph of its own"), ()
    name = aten_name(view.node).removesuffix("_")
    is_pointwise = torch.Tag.pointwise in target.tags or name in _POINTWISE
    if not all(is_tensor(each) for each in view.graph.made[view.node]):
        return Mixes("gives something that is no tensor"), ()
    make = _RULES.get(name) or (_pointwise if is_pointwise else None)
    if make is None:
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        return Mixes("draws random numbers" if is_random else "is not known to treat every row by itself"), ()
    if name not in _SIZED and view.counts_rows:
        return Mixes("computes with the number of rows"), ()
    try:
        return make(view)
    except (_UnknownError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Mixes(f"has arguments of which too little is known ({error})"), ()


def _axis(value: Any) -> int:
    if not isinstance(value, int):
        raise _UnknownError("an axis that is no number")
    return value


def _axes(value: Any) -> list[int]:
    return [_axis(value)] if not isinstance(value, Sequence) else [_axis(each) for each in value]


def _pointwise(view: AtenView) -> _Made:
    whole = view.out_rank
    read = view.tensors
    return spread(*(aligned(view.rank(each), whole) for each in read)), read


def _first(view: AtenView, over: Sequence[int] = (), *, removed: bool = False) -> _Made:
    """The first tensor keeps its axes except those in `over`; other tensors have no rows."""
    first, *rest = view.tensors
    maps = kept(view.rank(first), over, removed=removed), *(nowhere(view.rank(each)) for each in rest)
    return Axes((maps,)), view.tensors


def _over(*names: str, removed: bool = False) -> Callable[[AtenView], _Made]:
    """Over the axes given by these arguments."""

    def rule(view: AtenView) -> _Made:
        return _first(view, [axis for name in names for axis in _axes(view.given[name])], removed=removed)

    return rule


def _reduce(view: AtenView) -> _Made:
    given = view.given
    if "other" in given:  # the larger of two tensors
        return _pointwise(view)
    chosen = given.get("dim")
    over = list(range(view.rank(view.tensors[0]))) if chosen is None or chosen == [] else _axes(chosen)
    return _first(view, over, removed=not given.get("keepdim", False))


def _batched(*names: str, rank: int = 0) -> Callable[[AtenView], _Made]:
    """Rows are along axis 0 of these arguments, which have at least `rank` axes; other arguments are weights."""

    def rule(view: AtenView) -> _Made:
        given = view.given
        data = [given[name] for name in names if isinstance(given.get(name), fx.Node)]
        if any(view.rank(each) < rank for each in data):
            raise _UnknownError("inputs without a batch")
        read = view.tensors
        maps = tuple((batch_first if each in data else nowhere)(view.rank(each)) for each in read)
        return Axes((maps,)), read

    return rule


def _linear(view: AtenView) -> _Made:
    return _first(view, (-1,))


def _layer_norm(view: AtenView) -> _Made:
    rank = view.rank(view.tensors[0])
    return _first(view, range(rank - len(view.given["normalized_shape"]), rank))


def _product(left: str, right: str, added: str = "") -> Callable[[AtenView], _Made]:
    def rule(view: AtenView) -> _Made:
        given = view.given
        sides = [given[left], given[right]]
        maps = list(matrix_product(view.rank(sides[0]), view.rank(sides[1])))
        if added:
            sides.append(given[added])
            maps.append(aligned(view.rank(given[added]), view.out_rank))
        return spread(*maps), sides

    return rule


def _einsum(view: AtenView) -> _Made:
    read = list(view.given["tensors"])
    maps = einsum_maps(view.given["equation"], [view.rank(each) for each in read])
    if maps is None:
        return Mixes("has an equation with dots"), ()
    return spread(*maps), read


def _joined(view: AtenView) -> _Made:
    read = list(view.given["tensors"])
    axis = _axis(view.given["dim"])
    return Axes((tuple(kept(view.rank(each), (axis,)) for each in read),)), read


def _stack(view: AtenView) -> _Made:
    read = list(view.given["tensors"])
    rank = view.rank(read[0])
    axis = _axis(view.given["dim"]) % (rank + 1)
    return Axes(((tuple(at + (at >= axis) for at in range(rank)),) * len(read),)), read


def _slice(view: AtenView) -> _Made:
    given = view.given
    end = given["end"]
    is_all = given["start"] in (None, 0) and (end is None or (isinstance(end, int) and end >= _END))
    return _first(view, () if is_all and given["step"] == 1 else (_axis(given["dim"]),))


def _select(view: AtenView) -> _Made:
    return _first(view, (_axis(view.given["dim"]),), removed=True)


def _gather(view: AtenView) -> _Made:
    given = view.given
    read = [given["self"], given["index"]]
    axis = _axis(given["dim"])
    return Axes((tuple(kept(view.rank(each), (axis,)) for each in read),)), read


def _embedding(view: AtenView) -> _Made:
    given = view.given
    read = [given["weight"], given["indices"]]
    return Axes(((nowhere(2), kept(view.rank(read[1]))),)), read


def _index(view: AtenView) -> _Made:
    """Indexing by one list of positions."""
    given = view.given
    places = [(at, each) for at, each in enumerate(given["indices"]) if each is not None]
    if len(places) != 1 or places[0][1].meta["val"].dtype is torch.bool:
        return Mixes("picks by several indices, or by a mask"), ()
    [(axis, index)] = places
    data, picked = view.rank(given["self"]), view.rank(index)
    map_data = tuple(at if at < axis else None if at == axis else at - 1 + picked for at in range(data))
    return Axes(((map_data, tuple(axis + at for at in range(picked))),)), [given["self"], index]


def _permuted(order: Callable[[AtenView, int], Sequence[int]]) -> Callable[[AtenView], _Made]:
    def rule(view: AtenView) -> _Made:
        rank = view.rank(view.tensors[0])
        axes = [axis % rank for axis in order(view, rank)]
        return Axes(((tuple(axes.index(axis) for axis in range(rank)),),)), view.tensors[:1]

    return rule


def _exchanged(a: Any, b: Any, rank: int) -> list[int]:
    if not rank:  # torch allows this for 0-d tensors
        return []
    order, first, second = list(range(rank)), _axis(a) % rank, _axis(b) % rank
    order[first], order[second] = second, first
    return order


def _reshaped(view: AtenView) -> _Made:
    return Reshapes(), view.tensors[:1]


def _spread(view: AtenView) -> _Made:
    """Repeated along axes, or broadcast to a shape."""
    first = view.tensors[0]
    return Axes(((aligned(view.rank(first), view.out_rank),),), fills=True), [first]


def _filled(view: AtenView) -> _Made:
    if isinstance(view.given.get("fill_value"), fx.Node):
        return Mixes("fills with a number that is computed"), ()
    return Axes(((),), fills=True), ()


def _attention(view: AtenView) -> _Made:
    given = view.given
    read = [given["query"], given["key"], given["value"]]
    if view.rank(read[0]) < 3 or given.get("dropout_p"):
        raise _UnknownError("inputs without a batch, or with dropout")
    maps = [kept(view.rank(each), (-2, -1)) for each in read]
    mask = given.get("attn_mask")
    if mask is not None:
        read.append(mask)
        places = range(view.out_rank - view.rank(mask), view.out_rank)
        maps.append(tuple(at if at < view.out_rank - 2 else None for at in places))
    return Axes((tuple(maps),), broadcasts=frozenset((3,))), read


def _recurrent(view: AtenView) -> _Made:
    given = view.given
    if "input" not in given or "batch_first" not in given:
        return Mixes("takes packed sequences"), ()
    if view.rank(given["input"]) != 3:
        raise _UnknownError("inputs without a batch")
    axis = 0 if given["batch_first"] else 1
    states = given["hx"] if isinstance(given["hx"], Sequence) else [given["hx"]]

    def to(at: int) -> tuple[AxisMap, ...]:
        own = tuple(at if each == axis else None for each in range(3))
        return own, *(tuple(at if each == 1 else None for each in range(3)) for _ in states)

    return Axes((to(axis), to(1))), [given["input"], *states]


def _padded(view: AtenView) -> _Made:
    rank, pads = view.rank(view.tensors[0]), list(view.given["pad"])
    return _first(view, [rank - 1 - at // 2 for at, size in enumerate(pads) if size != 0])


def _mixes(why: str) -> Callable[[AtenView], _Made]:
    return lambda _: (Mixes(why), ())


_POINTWISE = frozenset(
    (
        *("to", "_to_copy", "clone", "contiguous", "alias", "dropout", "type_as", "hardtanh", "hardswish"),
        *("hardsigmoid", "relu6", "silu", "mish", "selu", "celu", "elu", "leaky_relu", "softplus", "softsign"),
        *("log_sigmoid", "threshold", "masked_fill", "square", "logical_not", "rsub", "true_divide", "floor_divide"),
    )
)
"""Pointwise operators without torch's tag."""
_SIZED = frozenset(
    (
        *("view", "reshape", "_unsafe_view", "unflatten", "flatten", "expand", "broadcast_to", "repeat", "tile"),
        *("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
    )
)
"""Operators with number arguments that are shapes, which they adapt to the number of their rows."""


def _table() -> dict[str, Callable[[AtenView], _Made]]:
    found = "gives as many as it finds among all rows"
    groups: tuple[tuple[Callable[[AtenView], _Made], str], ...] = (
        (_linear, "linear"),
        (_product("mat1", "mat2", "self"), "addmm"),
        (_product("batch1", "batch2", "self"), "baddbmm"),
        (_product("self", "mat2"), "mm bmm"),
        (_product("self", "other"), "matmul"),
        (_einsum, "einsum"),
        (_batched("input", rank=2), "batch_norm group_norm _native_batch_norm_legit_no_training"),
        (_batched("input", rank=3), "conv1d conv_transpose1d convolution _convolution instance_norm"),
        (_batched("input", rank=4), "conv2d conv_transpose2d grid_sampler"),
        (_batched("input", rank=5), "conv3d conv_transpose3d"),
        (_batched("self", rank=3), "max_pool1d avg_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_linear1d"),
        (
            _batched("self", rank=4),
            "max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d "
            "adaptive_max_pool2d pixel_shuffle pixel_unshuffle reflection_pad2d replication_pad2d im2col",
        ),
        (_batched("self", "input", rank=4), "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"),
        (_batched("self", rank=5), "max_pool3d avg_pool3d adaptive_avg_pool3d"),
        (_layer_norm, "layer_norm rms_norm native_layer_norm"),
        (_over("dim"), "softmax _softmax log_softmax _log_softmax cumsum cumprod topk sort argsort glu chunk split"),
        (_over("dim"), "split_with_sizes tensor_split narrow index_select"),
        (_over("dims"), "flip"),
        (_over("dim", removed=True), "unbind"),
        (_reduce, "sum mean amax amin any all prod argmax argmin max min std var norm linalg_vector_norm logsumexp"),
        (_joined, "cat concat"),
        (_stack, "stack"),
        (_slice, "slice"),
        (_select, "select"),
        (_gather, "gather"),
        (_embedding, "embedding"),
        (_index, "index"),
        (_permuted(lambda view, _: _axes(view.given["dims"])), "permute"),
        (
            _permuted(lambda view, rank: _exchanged(view.given["dim0"], view.given["dim1"], rank)),
            "transpose swapaxes",
        ),
        (_permuted(lambda _, rank: _exchanged(-1, -2, rank) if rank > 1 else list(range(rank))), "t mT"),
        (_permuted(lambda _, rank: range(rank - 1, -1, -1)), "numpy_T"),
        (_reshaped, "view reshape _unsafe_view view_as flatten unflatten squeeze unsqueeze"),
        (_spread, "expand expand_as broadcast_to repeat tile"),
        (_filled, "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor arange"),
        (_attention, "scaled_dot_product_attention"),
        (_recurrent, "lstm gru rnn_tanh rnn_relu"),
        (_padded, "pad constant_pad_nd"),
        (lambda view: _first(view, (-2, -1)), "triu tril"),
        (lambda view: _first(view, (1,)), "prelu _prelu_kernel"),
        (_mixes("takes bags with offsets, which lie across rows"), "embedding_bag _embedding_bag"),
        (_mixes(found), "nonzero unique unique_dim unique_consecutive _unique2 masked_select nms"),
        (_mixes("reads uninitialised memory"), "empty empty_like new_empty"),
    )
    return {name: rule for rule, names in groups for name in names.split()}


_RULES = _table()
