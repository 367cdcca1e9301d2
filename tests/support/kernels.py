"""Kernels in tests: a store with a compiler, and what a problem comes to by numpy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.packing import Array
from cotenant.techniques.layer_blocks.compile.problem import Activation, Problem
from cotenant.techniques.layer_blocks.compile.store import Store
from cotenant.techniques.layer_blocks.compile.target import Target, this_maker, this_target
from cotenant.techniques.layer_blocks.compile.toolchain import Compiler, find_compiler

ERF = np.vectorize(math.erf, otypes=[np.float64])


def a_compiler() -> Compiler:
    """The compiler of this machine; the test is skipped where there is none."""
    try:
        return find_compiler()
    except CompileError as error:
        pytest.skip(str(error))


def a_store(folder: Path, target: Target | None = None) -> Store:
    return Store(folder, target or this_target(), this_maker())


def activated(function: Activation, x: Array) -> Array:
    """An activation by numpy, in double precision."""
    x = x.astype(np.float64)
    given = function.parameters
    match function.kind:
        case "relu":
            return np.maximum(x, 0)
        case "clip":
            return np.clip(x, *given)
        case "leaky":
            return np.where(x > 0, x, given[0] * x)
        case "sigmoid":
            return 1 / (1 + np.exp(-x))
        case "silu":
            return x / (1 + np.exp(-given[0] * x))
        case "hard_sigmoid":
            return np.clip(given[0] * x + given[1], 0, 1)
        case "hard_swish":
            return x * np.clip(x + 3, 0, 6) / 6
        case "tanh":
            return np.tanh(x)
        case "gelu":
            return 0.5 * x * (1 + ERF(x / math.sqrt(2)))
        case _:
            return x


def convolved(problem: Problem, values: Array, weights: Array, bias: Array, added: Array | None) -> Array:
    """What a problem comes to, in double precision: [images, filters, rows, columns]."""
    top, left, bottom, right = problem.pads
    padded = np.pad(values.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, problem.extent, axis=(2, 3))
    windows = windows[:, :, :: problem.stride[0], :: problem.stride[1], :: problem.dilation[0], :: problem.dilation[1]]
    images, _, rows, columns = windows.shape[:4]
    grouped = windows.reshape(images, problem.groups, -1, rows, columns, *problem.kernel)
    filters = weights.astype(np.float64).reshape(problem.groups, -1, *weights.shape[1:])
    made = np.einsum("ngcyxhw,gfchw->ngfyx", grouped, filters).reshape(images, problem.filters, rows, columns)
    made += bias[:, None, None]
    return activated(problem.activation, made if added is None else made + added)
