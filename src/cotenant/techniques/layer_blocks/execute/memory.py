"""Memory of compiled models: packed weights, and buffers of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cotenant.linux import private_memory
from cotenant.techniques.layer_blocks.compile.packing import Array, pack_bias, pack_weights
from cotenant.techniques.layer_blocks.compile.problem import NONE, Problem
from cotenant.techniques.layer_blocks.execute.nodes import KernelNode

_HUGE_PAGE = 2 << 20


class PackedWeights:
    """Weights and bias of one model in the layout of kernels, each packed once. `constant` returns a constant by
    name."""

    def __init__(self, constant: Callable[[str], Array]) -> None:
        self._constant = constant
        self._known: dict[object, tuple[Array, Array]] = {}

    def packed(self, problems: Mapping[KernelNode, Problem], lanes: int) -> dict[KernelNode, tuple[Array, Array]]:
        """Packed weights and bias of these nodes, for vectors of `lanes` numbers."""
        keys = {node: (_packing_of(node, problem), lanes) for node, problem in problems.items()}
        lacking = {key: node for node, key in keys.items() if key not in self._known}
        arrays = [each for node in lacking.values() for each in self._pack(node, problems[node], lanes)]
        made = packed(arrays) if arrays else []
        self._known |= {key: (made[2 * at], made[2 * at + 1]) for at, key in enumerate(lacking)}
        return {node: self._known[key] for node, key in keys.items()}

    def _pack(self, node: KernelNode, problem: Problem, lanes: int) -> tuple[Array, Array]:
        weights = self._constant(node.weights)
        if node.kind == "product":
            weights = (weights if node.turned else weights.T)[:, :, None, None]
        bias = self._constant(node.bias).ravel() if node.bias else None
        return pack_weights(problem, weights, lanes), pack_bias(problem, bias, lanes)


def _packing_of(node: KernelNode, problem: Problem) -> object:
    """The key of packed weights: a node without the fields that do not matter, and the channels that a kernel reads."""
    same = {"inputs": (), "output": "", "activation": NONE, "adds": False}
    bare = replace(node, **same, stride=(1, 1), dilation=(1, 1), pads=(0, 0, 0, 0))  # type: ignore[arg-type]
    return bare, problem.channels, problem.filters, problem.pixels


def floats(count: int) -> Array:
    """Zeros, aligned to a huge page, and on huge pages where the system has them."""
    size = 4 * count + _HUGE_PAGE
    raw: Any = np.frombuffer(private_memory(size), np.uint8)
    at = -raw.ctypes.data % _HUGE_PAGE
    made: Array = raw[at : at + 4 * count].view(np.float32)
    return made


def packed(arrays: list[Array]) -> list[Array]:
    """Copies in one allocation, each aligned for vectors."""
    memory = floats(sum(-(-each.size // 16) * 16 for each in arrays))
    made, at = [], 0
    for each in arrays:
        made.append(memory[at : at + each.size])
        made[-1][...] = each.ravel()
        at += -(-each.size // 16) * 16
    return made
