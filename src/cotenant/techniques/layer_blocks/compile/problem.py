"""The problem of a kernel: a convolution or matrix product with fused operators, and the layout of its tensors."""

from __future__ import annotations

import math

from msgspec import Struct

from cotenant.errors import InvalidValueError

ACTIVATIONS: dict[str, int] = {
    "": 0,
    "relu": 0,
    "clip": 2,
    "leaky": 1,
    "sigmoid": 0,
    "silu": 1,
    "hard_sigmoid": 2,
    "hard_swish": 0,
    "tanh": 0,
    "gelu": 0,
}
"""Activations that can be fused, with their number of parameters."""


class Activation(Struct, frozen=True, forbid_unknown_fields=True):
    """An elementwise function.

    Parameters: the bounds of `clip` (None: no bound), the slope of `leaky`, a of `silu` (`x * sigmoid(a * x)`). Those
    of `hard_sigmoid` are a and b in `a * x + b`, clipped to [0, 1]. Raises InvalidValueError for other kinds or numbers
    of parameters, and for infinite ones.
    """

    kind: str = ""
    parameters: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if ACTIVATIONS.get(self.kind) != len(self.parameters):
            known = ", ".join(f"{kind or 'none'} with {count}" for kind, count in ACTIVATIONS.items())
            raise InvalidValueError("activation", "kind", (self.kind, self.parameters), f"one of {known} parameters")
        if any(not (self.kind == "clip" if each is None else math.isfinite(each)) for each in self.parameters):
            raise InvalidValueError("activation", self.kind, self.parameters, "finite parameters; no bound is None")


NONE = Activation()


class Problem(Struct, frozen=True, forbid_unknown_fields=True):
    """A convolution of FP32 tensors with bias, optionally a sum with another tensor, then an activation.

    `height` and `width` are those of the input without padding; `pads` are above, left, below, right. Tensors are in
    blocks of channels (see `compile.packing`), with zero borders of `in_halo`, `out_halo` and `add_halo` pixels;
    `in_halo` covers the padding. `pixels`: the input is channels last instead, for images with few channels. `rows`:
    output and added tensor are rows of `filters` numbers without border. A matrix product is a 1 x 1 convolution over
    one row of pixels.

    Raises InvalidValueError when a value is out of its range.
    """

    channels: int
    filters: int
    height: int
    width: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    groups: int = 1
    activation: Activation = NONE
    adds: bool = False
    in_halo: int = 0
    out_halo: int = 0
    add_halo: int = 0
    pixels: bool = False
    rows: bool = False
    dilation: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        steps = (*self.kernel, *self.stride, *self.dilation)
        sizes = (self.channels, self.filters, self.height, self.width, *steps, self.groups)
        if min(sizes) < 1 or min(self.pads) < 0:
            raise InvalidValueError("problem", "sizes", (*sizes, *self.pads), "at least 1, and padding of at least 0")
        if self.channels % self.groups or self.filters % self.groups:
            raise InvalidValueError("problem", "groups", self.groups, "a divisor of channels and filters")
        if self.in_halo < max(self.pads) or min(self.out_halo, self.add_halo) < 0:
            halos = (self.in_halo, self.out_halo, self.add_halo)
            raise InvalidValueError("problem", "halos", halos, "at least the padding, and 0 or more")
        if min(self.out_height, self.out_width) < 1:
            raise InvalidValueError("problem", "kernel", self.kernel, "one that fits into the padded input")
        if self.pixels and (self.groups > 1 or self.rows or self.dilation != (1, 1)):
            raise InvalidValueError("problem", "pixels", self.pixels, "False with groups, rows or a dilation")
        if self.rows and (self.groups > 1 or self.out_height > 1 or self.out_halo or self.add_halo):
            raise InvalidValueError("problem", "rows", self.rows, "a single row of pixels, no groups and no rim")

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns that a filter spans, with the gaps of its dilation."""
        (high, wide), (down, right) = self.kernel, self.dilation
        return (high - 1) * down + 1, (wide - 1) * right + 1

    @property
    def out_height(self) -> int:
        """Rows of the output."""
        return (self.height + self.pads[0] + self.pads[2] - self.extent[0]) // self.stride[0] + 1

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        return (self.width + self.pads[1] + self.pads[3] - self.extent[1]) // self.stride[1] + 1

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel has its own filter."""
        return self.groups > 1 and self.channels == self.filters == self.groups

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image."""
        area = self.out_height * self.out_width * self.kernel[0] * self.kernel[1]
        return area * self.filters * (self.channels // self.groups)


def product(rows: int, columns: int, depth: int, *, activation: Activation = NONE, adds: bool = False) -> Problem:
    """The product of a `rows` x `depth` matrix and a constant `depth` x `columns` matrix, as a problem."""
    return Problem(depth, columns, 1, rows, activation=activation, adds=adds, rows=True)
