"""Tuning knobs of a kernel: tile sizes and loop order, with the parallelism and locality that follow."""

from __future__ import annotations

import random
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from cotenant.techniques.layer_blocks.compile.packing import blocks_of, mixes_groups, spans_of
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.target import Target

_FLOAT_BYTES = 4
_MOST_STATEMENTS = 1600
"""Limit of unrolled multiply-adds in all tiles of a kernel: about one second of compile time."""
_SPARE_REGISTERS = 4
"""Registers for weights, the broadcast number and addresses."""


class Knobs(Struct, frozen=True, forbid_unknown_fields=True, tag="ckernel"):
    """A register tile is `blocks` blocks of filters x `rows` x `columns` pixels; `unroll` channels are unrolled.

    A task is `block_tiles` x `row_tiles` tiles of whole rows. `axis` is the axis that cores divide first: by `filters`
    each core reads its own weights and all pixels; by `pixels` the reverse. `order` is the operand that stays in the
    cache within a task, `weights` or `pixels`. `pass_blocks` blocks of channels are summed at a time (0: all); partial
    sums stay in the output.
    """

    blocks: int = 1
    rows: int = 1
    columns: int = 1
    unroll: int = 1
    block_tiles: int = 1
    row_tiles: int = 1
    axis: Literal["filters", "pixels"] = "filters"
    order: Literal["weights", "pixels"] = "weights"
    pass_blocks: int = 0


def tasks_of(problem: Problem, knobs: Knobs, target: Target) -> int:
    """The parallel extent: tasks of one image, which any number of cores divides."""
    tiles = -(-problem.out_height // knobs.rows)
    return -(-_block_tiles(problem, knobs, target) // knobs.block_tiles) * -(-tiles // knobs.row_tiles)


def parallelism_of(problem: Problem, knobs: Knobs, target: Target) -> int:
    """The parallel extent times the unrolled iterations (VELTAIR, Fig. 9)."""
    return tasks_of(problem, knobs, target) * knobs.blocks * knobs.rows * knobs.columns * knobs.unroll


def block_bytes(problem: Problem, knobs: Knobs, target: Target) -> int:
    """Working set of a task in bytes: weights of one pass, input and output (locality in VELTAIR, Fig. 9)."""
    lanes, (high, wide) = target.lanes, problem.kernel
    span = spans_of(problem, lanes)[1] if not problem.pixels else 1
    inner = min(knobs.pass_blocks or span, span)
    depth = problem.channels if problem.pixels else inner * (1 if problem.is_depthwise else lanes)
    blocks = min(knobs.blocks * knobs.block_tiles, blocks_of(problem.filters, lanes))
    rows = min(knobs.rows * knobs.row_tiles, problem.out_height)
    in_rows = (rows - 1) * problem.stride[0] + problem.extent[0]
    read = in_rows * (problem.width + 2 * problem.in_halo) * (blocks * lanes if problem.is_depthwise else depth)
    weights = blocks * lanes * high * wide * (1 if problem.is_depthwise else depth)
    return _FLOAT_BYTES * (weights + read + blocks * lanes * rows * problem.out_width)


def draw(problem: Problem, target: Target, count: int, seed: int) -> list[Knobs]:
    """Up to `count` distinct random knobs, among the tiles that fill most registers."""
    rng = random.Random(seed)
    tiles = _tiles(problem, target)
    found: dict[Knobs, None] = {}
    for _ in range(50 * count):
        if len(found) == count:
            break
        found.setdefault(_one(problem, target, rng, rng.choice(tiles)))
    return list(found)


def _one(problem: Problem, target: Target, rng: random.Random, tile: tuple[int, int, int]) -> Knobs:
    blocks, rows, columns = tile
    lanes = target.lanes
    shape = Knobs(blocks, rows, columns)
    wide, tall = _block_tiles(problem, shape, target), -(-problem.out_height // rows)
    knobs = Knobs(
        blocks,
        rows,
        columns,
        1 if problem.is_depthwise else _unroll(problem, lanes, rng, tile),
        _share(wide, rng),
        _share(tall, rng),
        rng.choice(("filters", "pixels")),
        rng.choice(("weights", "pixels")),
    )
    span = spans_of(problem, lanes)[1]
    is_whole = not (problem.is_depthwise or problem.pixels or mixes_groups(problem, lanes))
    can_split = is_whole and not (problem.rows and problem.filters % lanes)
    if can_split and span >= 4 and rng.random() < 0.15:
        return replace(knobs, pass_blocks=max(2, span // rng.choice((2, 4))))
    return knobs


def _share(count: int, rng: random.Random) -> int:
    """A number of tiles of a task: 1, all of them, or a fraction."""
    return rng.choice([1, *(max(1, -(-count // parts)) for parts in (8, 4, 2, 1))])


def _unroll(problem: Problem, lanes: int, rng: random.Random, tile: tuple[int, int, int]) -> int:
    if problem.pixels:
        return problem.kernel[1] * problem.channels
    area = _instances(problem, lanes, tile)
    tail = problem.channels // problem.groups % lanes if problem.groups == 1 else 0
    fits = [u for u in (2, 4, 8, 16) if lanes % u == 0 and tail % u == 0 and u * area <= _MOST_STATEMENTS]
    return rng.choice(fits or [1])


def _instances(problem: Problem, lanes: int, tile: tuple[int, int, int]) -> int:
    """Accumulators in the code of all tiles, those at the edges included."""
    blocks, rows, columns = tile
    total = blocks_of(problem.filters // problem.groups, lanes)
    parts = [(blocks, total), (rows, problem.out_height), (columns, problem.out_width)]
    whole = 1
    for size, extent in parts:
        whole *= (size if extent >= size else 0) + extent % size
    return whole


def _tiles(problem: Problem, target: Target) -> list[tuple[int, int, int]]:
    """Register tiles (blocks, rows, columns), repeated by their weight in the random choice."""
    room = target.registers - _SPARE_REGISTERS
    lanes = target.lanes
    filters = blocks_of(problem.filters, lanes)
    if problem.is_depthwise or problem.groups > 1:
        filters = 1 if spans_of(problem, lanes)[0] else min(filters, problem.filters // problem.groups // lanes or 1)
    deepest = 1 if problem.is_depthwise else min(filters, 8)
    found: list[tuple[float, tuple[int, int, int]]] = []
    taps = problem.kernel[0] * problem.kernel[1] if problem.is_depthwise else problem.kernel[1] * problem.channels
    each = taps if problem.is_depthwise or problem.pixels else 2
    for blocks in range(1, deepest + 1):
        for rows in range(1, min(problem.out_height, 4) + 1):
            for columns in range(1, min(problem.out_width, room) + 1):
                used = blocks * rows * columns
                tile = (blocks, rows, columns)
                if used > room or each * _instances(problem, lanes, tile) > _MOST_STATEMENTS:
                    continue
                found.append((_value(problem, filters, tile) * min(1.0, used / (0.7 * room)), tile))
    if not found:
        return [(1, 1, 1)]
    best = max(value for value, _ in found)
    good = [(value, tile) for value, tile in found if value >= 0.75 * best]
    return [tile for value, tile in good for _ in range(1 + round(6 * (value / best - 0.75) / 0.25))]


def _value(problem: Problem, filters: int, tile: tuple[int, int, int]) -> float:
    """Fraction of the work in full tiles, less the cost of loads beside multiply-adds."""
    fill = 1.0
    for size, extent in zip(tile, (filters, problem.out_height, problem.out_width), strict=True):
        fill *= extent / (-(-extent // size) * size)
    blocks, rows, columns = tile
    loads = blocks + rows * columns
    return fill * (1.0 if problem.is_depthwise else 1 / (1 + loads / (8 * blocks * rows * columns)))


def _block_tiles(problem: Problem, knobs: Knobs, target: Target) -> int:
    return len(block_tiles(problem, knobs.blocks, target.lanes))


def block_tiles(problem: Problem, blocks: int, lanes: int) -> list[tuple[int, int, int]]:
    """The blocks of filters by tiles: first block, number of blocks, and the first block of channels that it reads."""
    lows, _ = spans_of(problem, lanes)
    total = blocks_of(problem.filters, lanes)
    if lows:
        per_group = problem.filters // problem.groups // lanes if problem.filters // problem.groups % lanes == 0 else 1
        size = min(blocks, per_group)
        return [
            (at + first, min(size, per_group - first), lows[at + first])
            for at in range(0, total, per_group)
            for first in range(0, per_group, size)
        ]
    return [(at, min(blocks, total - at), 0) for at in range(0, total, blocks)]
