"""Tensor layouts of kernels, with numpy: activations in blocks of channels with zero borders, weights likewise.

An activation is [images][blocks of channels][rows][columns][channels of a block], its border included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cotenant.techniques.layer_blocks.compile.problem import Problem

Array = npt.NDArray[np.float32]


def blocks_of(channels: int, lanes: int) -> int:
    """Number of blocks for these channels; the last one is padded."""
    return -(-channels // lanes)


def spans_of(problem: Problem, lanes: int) -> tuple[list[int], int]:
    """The blocks of channels that a block of filters reads: the first one of each, and their number.

    Without groups every block reads all, and the list is empty. Blocks may hold channels of other groups: see
    `mixes_groups`.
    """
    total = blocks_of(problem.channels, lanes)
    if problem.groups == 1:
        return [], total
    if problem.is_depthwise:
        return [], 1
    deep, made = problem.channels // problem.groups, problem.filters // problem.groups
    read = []
    for first in range(0, problem.filters, lanes):
        last = min(first + lanes, problem.filters) - 1
        read.append((first // made * deep // lanes, ((last // made + 1) * deep - 1) // lanes))
    span = max(high - low + 1 for low, high in read)
    return [min(low, total - span) for low, _ in read], span


def mixes_groups(problem: Problem, lanes: int) -> bool:
    """Whether a filter reads blocks with channels of other groups, or with padding.

    Their weight is -0.0, which no other weight has. Kernels skip it, since infinity times 0 is NaN.
    """
    deep, made = problem.channels // problem.groups, problem.filters // problem.groups
    return problem.groups > 1 and not problem.is_depthwise and bool(deep % lanes or made % lanes)


def to_blocks(values: Array, lanes: int, halo: int) -> Array:
    """[images, channels, rows, columns] as blocks."""
    images, channels, rows, columns = values.shape
    blocks = blocks_of(channels, lanes)
    made = np.zeros((images, blocks, rows + 2 * halo, columns + 2 * halo, lanes), np.float32)
    padded = np.zeros((images, blocks * lanes, rows, columns), np.float32)
    padded[:, :channels] = values
    inner = padded.reshape(images, blocks, lanes, rows, columns).transpose(0, 1, 3, 4, 2)
    made[:, :, halo : halo + rows, halo : halo + columns] = inner
    return made


def from_blocks(blocks: Array, channels: int, halo: int) -> Array:
    """Blocks as [images, channels, rows, columns]."""
    images, count, high, wide, lanes = blocks.shape
    inner = blocks[:, :, halo : high - halo, halo : wide - halo]
    whole = inner.transpose(0, 1, 4, 2, 3).reshape(images, count * lanes, high - 2 * halo, wide - 2 * halo)
    return np.ascontiguousarray(whole[:, :channels])


def to_pixels(values: Array, halo: int) -> Array:
    """[images, channels, rows, columns] as channels last, with a border."""
    rims = ((0, 0), (0, 0), (halo, halo), (halo, halo))
    return np.ascontiguousarray(np.pad(values, rims).transpose(0, 2, 3, 1), np.float32)


def pack_weights(problem: Problem, weights: Array, lanes: int) -> Array:
    """Weights [filters, channels of a group, rows, columns] in the layout of this problem's kernels, for all knobs.

    [blocks of filters][blocks of channels][rows][columns][channels][filters]; depthwise [blocks][rows][columns][lanes].
    """
    high, wide = problem.kernel
    count = blocks_of(problem.filters, lanes)
    padded = np.zeros((count * lanes, *weights.shape[1:]), np.float32)
    padded[: problem.filters] = weights
    if problem.is_depthwise:
        return np.ascontiguousarray(padded.reshape(count, lanes, high, wide).transpose(0, 2, 3, 1))
    if problem.pixels:
        return np.ascontiguousarray(padded.reshape(count, lanes, -1, high, wide).transpose(0, 3, 4, 2, 1))
    lows, span = spans_of(problem, lanes)
    deep = problem.channels // problem.groups
    whole: Any = np.zeros((count * lanes, span * lanes, high, wide), np.float32)
    if not lows:
        whole[:, :deep] = padded
    else:
        if mixes_groups(problem, lanes):
            whole[...], padded = -0.0, padded + 0.0  # a sum with 0.0 is never -0.0
        made = problem.filters // problem.groups
        for filters in range(problem.filters):
            at = filters // made * deep - lows[filters // lanes] * lanes
            whole[filters, at : at + deep] = padded[filters]
    split = whole.reshape(count, lanes, span, lanes, high, wide)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 5, 3, 1))


def pack_bias(problem: Problem, bias: Array | None, lanes: int) -> Array:
    """One number per filter, padded to whole blocks."""
    made = np.zeros(blocks_of(problem.filters, lanes) * lanes, np.float32)
    if bias is not None:
        made[: problem.filters] = bias
    return made
