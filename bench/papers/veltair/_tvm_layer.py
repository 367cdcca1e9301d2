"""A layer as TVM takes it: on the same blocks of channels, rims and packed weights as the kernels in C, one image.

The output has no rim, and that of a matrix product lies in blocks.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.packing import blocks_of, spans_of
from cotenant.techniques.layer_blocks.compile.problem import Activation, Problem

MAIN = "layer"
"""Name of the block that is tiled."""


def output_shape(problem: Problem, lanes: int) -> tuple[int, ...]:
    """Blocks, rows, columns, channels of a block."""
    return blocks_of(problem.filters, lanes), problem.out_height, problem.out_width, lanes


def layer(problem: Problem, lanes: int) -> Any:
    """The function of a layer: input, weights, bias, the added tensor if there is one, output; see `compile.trial`.

    Raises CompileError for groups that are no whole blocks.
    """
    p = problem
    (high, wide), (down, right), (dig, dug) = p.kernel, p.stride, p.dilation
    top, left = p.in_halo - p.pads[0], p.in_halo - p.pads[1]
    plane = (p.height + 2 * p.in_halo, p.width + 2 * p.in_halo)
    shape = output_shape(p, lanes)
    bias = te.placeholder((shape[0], lanes), name="bias")
    r, s = te.reduce_axis((0, high), "r"), te.reduce_axis((0, wide), "s")

    def at(y: Any, x: Any) -> tuple[Any, Any]:
        return y * down + r * dig + top, x * right + s * dug + left

    if p.is_depthwise:
        source = te.placeholder((shape[0], *plane, lanes), name="x")
        weights = te.placeholder((shape[0], high, wide, lanes), name="w")
        made = te.compute(
            shape, lambda o, y, x, v: te.sum(source[(o, *at(y, x), v)] * weights[o, r, s, v], axis=[r, s]), name=MAIN
        )
    elif p.pixels:
        c = te.reduce_axis((0, p.channels), "c")
        source = te.placeholder((*plane, p.channels), name="x")
        weights = te.placeholder((shape[0], high, wide, p.channels, lanes), name="w")
        made = te.compute(
            shape,
            lambda o, y, x, v: te.sum(source[(*at(y, x), c)] * weights[o, r, s, c, v], axis=[r, s, c]),
            name=MAIN,
        )
    else:
        lows, span = spans_of(p, lanes)
        width, deep = p.filters // p.groups, p.channels // p.groups
        if lows and (width % lanes or deep % lanes):
            raise CompileError("TVM is given no layers with groups that are not whole blocks of channels")
        b, c = te.reduce_axis((0, span), "b"), te.reduce_axis((0, lanes), "c")
        source = te.placeholder((blocks_of(p.channels, lanes), *plane, lanes), name="x")
        weights = te.placeholder((shape[0], span, high, wide, lanes, lanes), name="w")
        made = te.compute(
            shape,
            lambda o, y, x, v: te.sum(
                source[(_first(o, lows, width // lanes, deep // lanes) + b, *at(y, x), c)] * weights[o, b, r, s, c, v],
                axis=[b, r, s, c],
            ),
            name=MAIN,
        )
    given = [source, weights, bias]
    added = None
    if p.adds:
        added = te.placeholder(shape, name="added")
        given.append(added)

    def end(o: Any, y: Any, x: Any, v: Any) -> Any:
        value = made[o, y, x, v] + bias[o, v]
        return activated(p.activation, value if added is None else value + added[o, y, x, v])

    return te.create_prim_func([*given, te.compute(shape, end, name="end")])


def _first(block: Any, lows: list[int], made: int, deep: int) -> Any:
    """The first block of channels that a block of filters reads."""
    return tirx.floordiv(block, made) * deep if lows else 0


def activated(function: Activation, x: Any) -> Any:
    """An activation as TVM writes it."""
    sides = (float("-inf"), float("inf"))  # of a clip without a bound
    numbers = [sides[at] if each is None else each for at, each in enumerate(function.parameters)]
    given = [tirx.const(each, "float32") for each in numbers]
    zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")
    match function.kind:
        case "":
            return x
        case "relu":
            return te.max(x, zero)
        case "clip":
            return te.min(te.max(x, given[0]), given[1])
        case "leaky":
            return te.max(x, zero) + given[0] * te.min(x, zero)
        case "sigmoid":
            return one / (one + tirx.exp(-x))
        case "silu":
            return x / (one + tirx.exp(-given[0] * x))
        case "hard_sigmoid":
            return te.min(te.max(given[0] * x + given[1], zero), one)
        case "hard_swish":
            return x * te.min(te.max(x + tirx.const(3.0, "float32"), zero), tirx.const(6.0, "float32")) / 6.0
        case "tanh":
            return tirx.tanh(x)
        case _:
            return x * tirx.const(0.5, "float32") * (one + tirx.erf(x * tirx.const(0.707106781, "float32")))
