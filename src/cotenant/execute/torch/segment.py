"""Cuts the operators of some units out of a program, as a Python function over tensors and weights."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cotenant.execute.torch.fold import moved_devices
from cotenant.graph.dfg import Dfg
from cotenant.graph.torch import TorchGraph, is_size, size_sources
from cotenant.graph.torch_lower import aten_name
from cotenant.graph.torch_sizes import expression_of


@dataclass(slots=True)
class Segment:
    """Units [start, end) on a device, as a function of tensors `inputs`, then weights `weights`; returns `outputs`."""

    start: int
    end: int
    device: torch.device
    function: Callable[..., tuple[torch.Tensor, ...]]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]


_FRESH = frozenset(
    ("conv1d", "conv2d", "conv3d", "linear", "addmm", "mm", "bmm", "batch_norm", "layer_norm", "group_norm", "cat")
)
"""Operators with results in newly allocated memory."""
_IN_PLACE = frozenset(
    (
        *("add", "sub", "mul", "div", "relu", "hardtanh", "clamp", "leaky_relu", "elu", "silu", "mish"),
        *("sigmoid", "tanh", "hardswish", "hardsigmoid"),
    )
)
"""Elementwise operators that may overwrite their first argument if no other operator reads it."""


class TorchCutter:
    """Cuts one program. `modules` are the bodies of its control flow, by name."""

    def __init__(self, graph: TorchGraph, dfg: Dfg, modules: dict[str, torch.nn.Module]) -> None:
        self._graph = graph
        self._dfg = dfg
        self._modules = modules
        by_name = {node.name: node for node in graph.nodes}
        self._nodes = [by_name[op.name] for op in dfg.operators]
        self._named = graph.by_name

    def segment(self, start: int, end: int, device: torch.device) -> Segment:
        """Build units [start, end) for weights on `device`."""
        dfg, graph = self._dfg, self._graph
        outputs = dfg.segment_io(start, end)[1] if end < len(dfg.units) else graph.outputs
        made = {text for unit in dfg.units[start:end] for text in unit.outputs}
        outputs = tuple(text for text in outputs if text in made)
        return self._built(range(start, end), size_sources(dfg, graph, start), outputs, device)

    def segment_of(
        self, units: Sequence[int], inputs: Sequence[str], outputs: Sequence[str], device: torch.device
    ) -> Segment:
        """Build these units, in order, over `inputs`.

        Raises AssertionError for a size not in these or the model's inputs.
        """
        at_hand = tuple(dict.fromkeys((*inputs, *self._graph.inputs)))
        return self._built(units, at_hand, outputs, device)

    def _built(
        self, units: Sequence[int], at_hand: Sequence[str], outputs: Sequence[str], device: torch.device
    ) -> Segment:
        nodes = [self._nodes[at] for unit in units for at in self._dfg.units[unit].operators]
        built = _Builder(self._graph, self._named, at_hand, device)
        built.weights_of(nodes)
        for node in nodes:
            built.add(node)
        return built.finish(min(units), max(units) + 1, outputs, self._modules)

    def why_eager(self, start: int, end: int) -> str:
        """Why these units cannot be captured: an operator that needs values on the host; "" without one."""
        for unit in self._dfg.units[start:end]:
            for node in map(self._nodes.__getitem__, unit.operators):
                if _waits_for_values(node):
                    return f"operator {node.name!r} needs values on the host"
        return ""


def _waits_for_values(node: fx.Node) -> bool:
    """Whether the host needs values before it can go on: numbers of tensors, or sizes that depend on them."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function"  # control flow
    if torch.Tag.data_dependent_output in target.tags or free_unbacked_symbols(node.meta.get("val")):
        return True
    masks = [each for each in node.all_input_nodes if getattr(each.meta.get("val"), "dtype", None) is torch.bool]
    return aten_name(node).startswith("index_put") and bool(masks)


class _Builder:
    def __init__(
        self, graph: TorchGraph, named: dict[str, fx.Node], at_hand: Sequence[str], device: torch.device
    ) -> None:
        self._graph = graph
        self._device = device
        self._new = fx.Graph()
        self._env: dict[fx.Node, Any] = {}
        self._by_size: dict[Any, tuple[fx.Node, int]] = {}
        self._weights: list[str] = []
        self._inputs: dict[str, fx.Node] = {}
        self._own: set[fx.Node] = set()
        for text in at_hand:
            old = named[text]
            self._inputs[text] = self._env[old] = self._new.placeholder(f"in_{old.name}")
            self._sizes_of(old)

    def weights_of(self, nodes: Sequence[fx.Node]) -> None:
        for old in dict.fromkeys(source for node in nodes for source in node.all_input_nodes):
            if old in self._graph.lowered.weights:
                self._env[old] = self._new.placeholder(f"w_{old.name}")
                self._weights.append(self._graph.lowered.weights[old])
            elif old.op == "get_attr":
                self._env[old] = self._new.get_attr(str(old.target))

    def add(self, node: fx.Node) -> None:
        """Add an operator, with the sizes that it reads and the results that it makes."""
        copy = self._env[node] = self._copied(node)
        if aten_name(node) in _FRESH or self._writes_over(node):
            self._own.add(node)
        for part in self._graph.made[node]:
            if part is not node:
                self._env[part] = self._new.call_function(operator.getitem, (copy, part.args[1]))
            self._sizes_of(part)

    def finish(self, start: int, end: int, outputs: Sequence[str], modules: dict[str, torch.nn.Module]) -> Segment:
        made = {self._graph.names[old]: new for old, new in self._env.items() if old in self._graph.names}
        self._new.output(tuple(made[text] for text in outputs))
        unused = [text for text, node in self._inputs.items() if not node.users]
        for text in unused:
            self._new.erase_node(self._inputs.pop(text))
        module = fx.GraphModule(modules, self._new, f"Units{start}To{end}")
        return Segment(
            start, end, self._device, module.forward, tuple(self._inputs), tuple(self._weights), tuple(outputs)
        )

    def _copied(self, node: fx.Node) -> fx.Node:
        given, named = moved_devices((node.args, node.kwargs), self._device)
        target: Any = node.target
        if self._writes_over(node):  # saves memory traffic: a new tensor would be as large as this one
            target = getattr(getattr(torch.ops.aten, f"{aten_name(node)}_"), target._overloadname)
        return self._new.call_function(target, *_mapped(given, named, self._value))

    def _writes_over(self, node: fx.Node) -> bool:
        """Whether the operator may overwrite its first argument, made in this segment and read by no other operator.

        Tensors from outside are never overwritten: the caller may run the segment again.
        """
        first = node.args[0] if node.args else None
        if aten_name(node) not in _IN_PLACE or not isinstance(first, fx.Node):
            return False
        if first not in self._own or len(first.users) != 1 or first in self._graph.lowered.outputs:
            return False
        ours, made = first.meta["val"], node.meta["val"]
        twin = getattr(torch.ops.aten, f"{aten_name(node)}_", None)
        has_twin = getattr(twin, getattr(node.target, "_overloadname", ""), None) is not None
        shapes = [[expression_of(dim) for dim in each.shape] for each in (ours, made)]
        return has_twin and ours.dtype == made.dtype and shapes[0] == shapes[1]

    def _value(self, old: fx.Node) -> Any:
        if old not in self._env:
            assert is_size(self._graph, old), f"{old} is not at hand"
            self._env[old] = self._size(old)
        return self._env[old]

    def _size(self, old: fx.Node) -> Any:
        """A size: constant, computed as in the program, or read from a dimension of a tensor."""
        expression = expression_of(old.meta.get("val"))
        if isinstance(expression, int):
            return expression
        try:
            return self._copied(old)
        except AssertionError:
            if expression not in self._by_size:
                raise
        tensor, dim = self._by_size[expression]
        return self._new.call_function(torch.ops.aten.sym_size.int, (tensor, dim))

    def _sizes_of(self, old: fx.Node) -> None:
        value = old.meta.get("val")
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                expression = expression_of(size)
                if expression is not None and not isinstance(expression, int):
                    self._by_size.setdefault(expression, (self._env[old], dim))


def _mapped(given: Any, named: Any, value: Callable[[fx.Node], Any]) -> Iterator[Any]:
    yield tuple(fx.node.map_arg(given, value))
    yield dict(fx.node.map_arg(named, value))
