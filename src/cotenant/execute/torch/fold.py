"""Constant folding when a program is opened: batch normalisation into convolutions, and constant operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.nn.utils.fusion import fuse_conv_bn_weights

from cotenant.graph.torch_lower import Lowered, argument, aten_name, is_tensor

_CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
_MOST_CONSTANT_BYTES = 1 << 20
_LARGEST_SCALE = 1e6
"""A normalisation with a larger scale has a variance near 0 and is not folded: the weights would lose digits."""


def fold(lowered: Lowered, weights: dict[str, torch.Tensor]) -> None:
    """Simplify a functional graph in place; new weights are added to `weights`, by full name.

    A normalisation is folded if its convolution has no other reader and both are in FP32 or FP64. Its scale must be
    finite and at most `_LARGEST_SCALE`. The new weights are computed in FP64. A constant is folded up to 1 MiB, or up
    to the size of its inputs.
    """
    if lowered.trouble:
        return
    with torch.no_grad():
        for node in list(lowered.graph.nodes):
            if node.op == "call_function" and aten_name(node) == "batch_norm":
                _fold_norm(lowered, weights, node)
        for node in list(lowered.graph.nodes):
            if node.op == "call_function":
                _fold_constant(lowered, weights, node)
    for node in reversed(list(lowered.graph.nodes)):
        if node in lowered.weights and not node.users:
            lowered.graph.erase_node(node)
            weights.pop(lowered.weights.pop(node), None)
    kept = set(lowered.weights.values())
    for name in [name for name in weights if name not in kept]:
        del weights[name]


def moved_devices(value: Any, device: torch.device) -> Any:
    """Arguments with every device in them replaced."""
    return fx.node.map_aggregate(value, lambda each: device if isinstance(each, torch.device) else each)


def _fold_norm(lowered: Lowered, weights: dict[str, torch.Tensor], norm: fx.Node) -> None:
    conv = norm.args[0]
    if not isinstance(conv, fx.Node) or aten_name(conv) not in _CONVOLUTIONS or len(conv.users) != 1:
        return
    kernel, bias = argument(conv, 1), argument(conv, 2)
    scale, shift, mean, variance = (argument(norm, place) for place in (1, 2, 3, 4))
    parts = [kernel, bias, scale, shift, mean, variance]
    if any(part is not None and part not in lowered.weights for part in parts) or mean is None or variance is None:
        return
    values = [None if part is None else weights[lowered.weights[part]] for part in parts]
    if any(value is not None and value.dtype not in (torch.float32, torch.float64) for value in values):
        return
    w, b, gamma, beta, mu, var = (None if value is None else value.double() for value in values)
    assert w is not None
    assert mu is not None
    assert var is not None
    eps = float(argument(norm, 7))
    factor = torch.rsqrt(var + eps) * (1.0 if gamma is None else gamma)
    if not bool(torch.isfinite(factor).all()) or float(factor.abs().max()) > _LARGEST_SCALE:
        return
    new_w, new_b = fuse_conv_bn_weights(w, b, mu, var, eps, gamma, beta)
    dtype = weights[lowered.weights[kernel]].dtype
    arguments = list(conv.args) + [None] * (3 - len(conv.args))
    arguments[1] = new_weight(lowered, weights, f"{conv.name}_weight", new_w.detach().to(dtype))
    arguments[2] = new_weight(lowered, weights, f"{conv.name}_bias", new_b.detach().to(dtype))
    conv.args = tuple(arguments)
    conv.kwargs = {key: value for key, value in conv.kwargs.items() if key not in ("weight", "bias")}
    norm.replace_all_uses_with(conv)
    lowered.outputs = tuple(conv if node is norm else node for node in lowered.outputs)
    lowered.graph.erase_node(norm)


def _fold_constant(lowered: Lowered, weights: dict[str, torch.Tensor], node: fx.Node) -> None:
    target: Any = node.target
    sources = node.all_input_nodes
    if (
        not isinstance(target, torch._ops.OpOverload)
        or not is_tensor(node)
        or any(source not in lowered.weights for source in sources)
        or torch.Tag.nondeterministic_seeded in target.tags
        or "empty" in aten_name(node)
        or any(not isinstance(dim, int) for dim in node.meta["val"].shape)
    ):
        return
    known: Mapping[fx.Node, torch.Tensor] = {source: weights[lowered.weights[source]] for source in sources}
    most = max(_MOST_CONSTANT_BYTES, sum(value.nbytes for value in known.values()))
    if node.meta["val"].numel() * node.meta["val"].dtype.itemsize > most:
        return
    given, named = moved_devices((node.args, node.kwargs), torch.device("cpu"))
    result = target(*fx.node.map_arg(given, known.__getitem__), **fx.node.map_arg(named, known.__getitem__))
    if not isinstance(result, torch.Tensor):
        return
    made = new_weight(lowered, weights, f"{node.name}_constant", result)
    node.replace_all_uses_with(made)
    lowered.outputs = tuple(made if each is node else each for each in lowered.outputs)
    lowered.graph.erase_node(node)


def new_weight(lowered: Lowered, weights: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> fx.Node:
    """A placeholder for a new weight, at the head of the graph."""
    while name in weights:
        name += "_"
    with lowered.graph.inserting_before(next(iter(lowered.graph.nodes))):
        node = lowered.graph.placeholder(name)
    node.meta = {"val": value}
    weights[name] = value
    lowered.weights[node] = name
    return node
