"""Stores the weights of recurrent layers contiguously on a GPU, in cuDNN's order: otherwise each run copies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from cotenant.graph.torch_lower import Lowered, argument, aten_name

_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_MODES = tuple(_GATES)
"""In the order of cuDNN's numbers (cudnnRNNMode_t)."""
_flatten: Any = torch._cudnn_rnn_flatten_weight
_cudnn: Any = torch.backends.cudnn


def flatten(lowered: Lowered, placed: Mapping[str, torch.Tensor]) -> None:
    """Replace the weights of each recurrent layer, by full name and on a GPU, by views of one tensor, in place.

    Layers with weights that are computed, shared with another layer, or of a type that cuDNN lacks are left unchanged.
    """
    seen: set[str] = set()
    for node in lowered.graph.nodes:
        gates = _GATES.get(aten_name(node)) if node.op == "call_function" else None
        params = argument(node, 2) if gates is not None else None
        if not isinstance(params, list | tuple) or any(each not in lowered.weights for each in params):
            continue
        names = [lowered.weights[each] for each in params]
        layer = [placed[name] for name in names]
        is_unshared = len({each.data_ptr() for each in layer}) == len(layer) and not seen & set(names)
        if is_unshared and _cudnn.is_acceptable(layer[0]):
            _join(node, layer, gates or 1)
        seen.update(names)


def _join(node: fx.Node, layer: list[torch.Tensor], gates: int) -> None:
    has_biases, layers, is_two_way, batch_first = (argument(node, place) for place in (3, 4, 7, 8))
    hidden, inputs = layer[0].shape[0] // gates, layer[0].shape[1]
    projected = layer[1].shape[1] if layer[1].shape[1] != hidden else 0
    per_direction = (4 if has_biases else 2) + bool(projected)
    mode = _MODES.index(aten_name(node))
    with torch.no_grad():
        _flatten(layer, per_direction, inputs, mode, hidden, projected, layers, batch_first, is_two_way)
