"""Keeps the indices of a torch program inside their tables.

An index outside its table raises an error on a CPU. On a GPU a kernel asserts, and the context of the process is lost:
one query would end the service of all tenants. So limits of inputs that are indices are found once, and
`InputCheck.check_values` checks every query on the host. Indices that the program computes are clamped.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cotenant.graph.torch_lower import Lowered, argument, aten_name, is_tensor
from cotenant.graph.torch_sizes import expression_of

Limits = Mapping[str, tuple[int, int]]
"""By input: the smallest and the largest value that the program allows."""

_SHAPES = "view reshape _unsafe_view view_as flatten unflatten permute transpose t numpy_T mT movedim squeeze unsqueeze"
_COPIES = "expand expand_as broadcast_to repeat tile clone contiguous flip roll"
_PARTS = "slice select narrow index_select gather index split split_with_sizes chunk unbind"
_ALL = frozenset(_SHAPES.split()) | frozenset(_COPIES.split())
"""Operators with results that have every element of their first argument, and no other."""
_SOME = _ALL | frozenset(_PARTS.split())
"""Operators with results that have only elements of their first argument."""
_CASTS = frozenset(("to", "_to_copy", "type_as", "long", "int"))
_PLACES = {"argmax": 0, "argmin": 0, "argsort": 0, "topk": 1, "sort": 1, "max": 1, "min": 1}
"""Operators that return positions along an axis, and which of their results has them."""
_WHOLE = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


@dataclass(frozen=True, slots=True)
class _Interval:
    """Values from `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Below:
    """Values from 0 to below a size, given by its expression."""

    size: Any


@dataclass(frozen=True, slots=True)
class _Traced:
    """All values of an input, plus `shift`."""

    node: fx.Node
    shift: int


_Known = tuple[_Interval | _Below | _Traced, ...] | None
"""Sets that contain a tensor's values; None where they are unknown."""


@dataclass(frozen=True, slots=True)
class _Use:
    """An operator that reads a tensor as an index into an axis of another one. `path` leads to it in the arguments."""

    node: fx.Node
    path: tuple[int, ...]
    table: fx.Node | None
    axis: int
    wraps: bool
    """Whether negative values count from the end."""

    @property
    def index(self) -> Any:
        """The tensor of indices, or None."""
        value: Any = argument(self.node, self.path[0])
        for place in self.path[1:]:
            value = value[place]
        return value

    @property
    def size(self) -> Any:
        """The size of the axis: a number or an expression."""
        if self.table is None:
            return expression_of(argument(self.node, self.axis))
        return expression_of(self.table.meta["val"].shape[self.axis])


def bound_indices(lowered: Lowered, weights: Mapping[str, torch.Tensor], *, clamps: bool) -> Limits:
    """Find the limits of inputs that are indices, by the input's node name.

    With `clamps`, an index that is neither an input nor known to fit is clamped into its table, in place. A value
    outside then gives the nearest entry, in the outputs of that query only. Operators with graphs of their own (`cond`,
    `map`) are not analysed.
    """
    known: dict[fx.Node, _Known] = {}
    limits: dict[str, tuple[int, int]] = {}
    for node in list(lowered.graph.nodes):
        known[node] = _known(node, lowered, weights, known)
        for use in _uses(node):
            if not isinstance(use.index, fx.Node) or use.index.meta["val"].dtype not in _WHOLE:
                continue
            size, unproven = use.size, False
            for each in known.get(use.index) or (None,):
                if isinstance(each, _Traced) and isinstance(size, int):
                    least, most = (-size if use.wraps else 0) - each.shift, size - 1 - each.shift
                    low, high = limits.get(each.node.name, (least, most))
                    limits[each.node.name] = max(low, least), min(high, most)
                else:
                    unproven |= not _fits(each, size, use.wraps)
            if unproven and clamps:
                _clamp(lowered.graph, use)
    return limits


def _fits(known: _Interval | _Below | _Traced | None, size: Any, wraps: bool) -> bool:
    if isinstance(known, _Below):
        if known.size == size:
            return True
        return isinstance(known.size, int) and isinstance(size, int) and known.size <= size
    if isinstance(known, _Interval) and isinstance(size, int):
        return (-size if wraps else 0) <= known.low and known.high < size
    return False


def _uses(node: fx.Node) -> Iterator[_Use]:
    """The indices that an operator reads."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return
    name = aten_name(node).removesuffix("_")
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if first is None:
        return
    if name in ("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"):
        yield _Use(node, (1,), first, 0, wraps=False)
    elif name in ("index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy",
                  "index_fill", "index_reduce"):  # fmt: skip
        axis = argument(node, 1)
        if isinstance(axis, int) and first.meta["val"].ndim:
            yield _Use(node, (2,), first, axis, wraps=False)
    elif name == "one_hot":
        yield _Use(node, (0,), None, 1, wraps=False)
    elif name in ("index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"):
        axis = 0
        for place, index in enumerate(argument(node, 1)):
            is_mask = isinstance(index, fx.Node) and index.meta["val"].dtype is torch.bool
            if isinstance(index, fx.Node) and not is_mask:
                yield _Use(node, (1, place), first, axis, wraps=True)
            axis += index.meta["val"].ndim if is_mask else 1


def _known(
    node: fx.Node, lowered: Lowered, weights: Mapping[str, torch.Tensor], known: Mapping[fx.Node, _Known]
) -> _Known:
    """Known values of a tensor of integers."""
    if not is_tensor(node) or node.meta["val"].dtype not in _WHOLE or lowered.trouble:
        return None
    if node in lowered.weights:
        value = weights[lowered.weights[node]]
        return (_Interval(int(value.min()), int(value.max())),) if value.numel() else ()
    if node in lowered.inputs:
        return (_Traced(node, 0),)
    if node.op != "call_function":
        return None
    name, given = aten_name(node), node.args
    first = known.get(given[0]) if given and isinstance(given[0], fx.Node) else None
    if name == "getitem" and isinstance(given[0], fx.Node):
        return _of_several(given[0], given[1], known)
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if name in ("cat", "concat", "stack", "hstack", "vstack"):
        parts = [known.get(each) for each in argument(node, 0)]
        return None if any(part is None for part in parts) else tuple(each for part in parts for each in part or ())
    if name in _CASTS:
        return first if _is_wider(given[0], node) else None
    if name in _ALL:
        return first
    if name in _SOME:
        return _selected(first)
    if name in ("add", "sub") and len(given) == 2 and isinstance(given[1], int) and not node.kwargs.get("alpha"):
        return _shifted(first, given[1] if name == "add" else -given[1])
    return _made(node, name)


def _made(node: fx.Node, name: str) -> _Known:
    """Known values of integers that an operator makes by itself."""
    if name == "arange":
        start = argument(node, 0) if node.target is not torch.ops.aten.arange.default else 0
        end = argument(node, 0) if node.target is torch.ops.aten.arange.default else argument(node, 1)
        size = expression_of(end.meta["val"] if isinstance(end, fx.Node) else end)
        return (_Below(size),) if start == 0 and size is not None else None
    if name in ("zeros", "zeros_like", "new_zeros"):
        return (_Interval(0, 0),)
    if name in ("full", "full_like", "new_full") and isinstance(
        value := argument(node, 2 if name == "new_full" else 1), int
    ):
        return (_Interval(value, value),)
    if name == "clamp":
        low, high = argument(node, 1), argument(node, 2)
        if isinstance(low, int) and isinstance(high, int):
            return (_Interval(min(low, high), high),)
    if name == "remainder" and isinstance(by := argument(node, 1), int) and by > 0:
        return (_Interval(0, by - 1),)
    if _PLACES.get(name) == 0:
        return _places(node)
    return None


def _of_several(node: fx.Node, place: Any, known: Mapping[fx.Node, _Known]) -> _Known:
    """Known values of one result of an operator that has several."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = aten_name(node)
    if _PLACES.get(name) == place:
        return _places(node)
    source = node.args[0] if node.args else None
    if name in _SOME and isinstance(source, fx.Node):
        return _selected(known.get(source))
    return None


def _places(node: fx.Node) -> _Known:
    """Positions along the axis that an operator reduces."""
    source = node.args[0]
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    if not isinstance(source, fx.Node) or "dim" not in names:
        return None
    axis = argument(node, names.index("dim"))
    if not isinstance(axis, int) or not source.meta["val"].ndim:
        return None
    return (_Below(expression_of(source.meta["val"].shape[axis])),)


def _selected(known: _Known) -> _Known:
    """A subset of the values; nothing is known of a subset of an input, which has no common limit."""
    return None if known is None or any(isinstance(each, _Traced) for each in known) else known


def _shifted(known: _Known, by: int) -> _Known:
    found: list[_Interval | _Below | _Traced] = []
    for each in known or ():
        if isinstance(each, _Interval):
            found.append(_Interval(each.low + by, each.high + by))
        elif isinstance(each, _Traced):
            found.append(_Traced(each.node, each.shift + by))
        elif isinstance(each.size, int):
            found.append(_Interval(by, each.size - 1 + by))
        else:
            return None
    return None if known is None else tuple(found)


def _is_wider(source: Any, node: fx.Node) -> bool:
    """Whether a cast keeps all values."""
    if not isinstance(source, fx.Node) or source.meta["val"].dtype not in _WHOLE:
        return False
    before, after = torch.iinfo(source.meta["val"].dtype), torch.iinfo(node.meta["val"].dtype)
    return after.min <= before.min and before.max <= after.max


def _clamp(graph: fx.Graph, use: _Use) -> None:
    """Insert a clamp before an index."""
    length: Any = use.size
    with graph.inserting_before(use.node):
        if not isinstance(length, int):
            assert use.table is not None
            length = graph.call_function(torch.ops.aten.sym_size.int, (use.table, use.axis))
            length.meta["val"] = use.table.meta["val"].shape[use.axis]
        bounds = _less(graph, 0, length) if use.wraps else 0, _less(graph, length, 1)
        held = graph.call_function(torch.ops.aten.clamp.default, (use.index, *bounds))
        held.meta["val"] = use.index.meta["val"]
    _replace(use, held)


def _less(graph: fx.Graph, number: Any, by: Any) -> Any:
    """A difference of numbers, each of which may be a node."""
    if isinstance(number, int) and isinstance(by, int):
        return number - by
    made = graph.call_function(operator.sub, (number, by))
    made.meta["val"] = operator.sub(*(each.meta["val"] if isinstance(each, fx.Node) else each for each in made.args))
    return made


def _replace(use: _Use, held: fx.Node) -> None:
    place, *inner = use.path
    value: Any = held
    if inner:
        rest = list(argument(use.node, place))
        rest[inner[0]] = held
        value = rest
    name = use.node.target._schema.arguments[place].name  # type: ignore[union-attr]
    if name in use.node.kwargs:
        use.node.kwargs = {**use.node.kwargs, name: value}
    else:
        arguments: Sequence[Any] = use.node.args
        use.node.args = (*arguments[:place], value, *arguments[place + 1 :])
