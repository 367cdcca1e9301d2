"""Random tensors of one problem in the layout of kernels, on which candidates are measured."""

from __future__ import annotations

import numpy as np

from cotenant.techniques.layer_blocks.compile.native import KernelStep, aligned, aligned_copy
from cotenant.techniques.layer_blocks.compile.packing import (
    Array,
    blocks_of,
    pack_bias,
    pack_weights,
    to_blocks,
    to_pixels,
)
from cotenant.techniques.layer_blocks.compile.problem import Problem

_SEED = 1


class Trial:
    """Random tensors of one problem, and steps that run candidates on them."""

    def __init__(self, problem: Problem, lanes: int, images: int = 1) -> None:
        rng = np.random.default_rng(_SEED)
        p = problem
        self.problem, self.images = problem, images
        deep = p.channels // p.groups
        self.values: Array = rng.standard_normal((images, p.channels, p.height, p.width), np.float32)
        self.weights: Array = rng.standard_normal((p.filters, deep, *p.kernel), np.float32)
        self.weights *= (deep * p.kernel[0] * p.kernel[1]) ** -0.5
        self.bias: Array = rng.standard_normal(p.filters, np.float32)
        laid = to_pixels(self.values, p.in_halo) if p.pixels else to_blocks(self.values, lanes, p.in_halo)
        self.input = aligned_copy(laid)
        self.packed_weights = aligned_copy(pack_weights(p, self.weights, lanes))
        self.packed_bias = aligned_copy(pack_bias(p, self.bias, lanes))
        self.out_shape = self._shape(p.out_halo, lanes)
        self.out = aligned(int(np.prod(self.out_shape))).reshape(self.out_shape)
        self.added = aligned(int(np.prod(self._shape(p.add_halo, lanes)))).reshape(self._shape(p.add_halo, lanes))
        if p.adds:
            self.plain_added = rng.standard_normal((images, p.filters, p.out_height, p.out_width), np.float32)
            plain = self.plain_added
            self.added[...] = plain[:, :, 0].transpose(0, 2, 1) if p.rows else to_blocks(plain, lanes, p.add_halo)

    def _shape(self, halo: int, lanes: int) -> tuple[int, ...]:
        p = self.problem
        if p.rows:
            return self.images, p.out_width, p.filters
        blocks = blocks_of(p.filters, lanes)
        return self.images, blocks, p.out_height + 2 * halo, p.out_width + 2 * halo, lanes

    def step(self, run: int) -> KernelStep:
        """The call of a kernel on these tensors."""
        made = KernelStep(run=run)
        for at, array in enumerate((self.input, self.packed_weights, self.packed_bias, self.added, self.out)):
            made.p[at] = array.ctypes.data
        strides = (self.input[0].size, self.added[0].size, self.out[0].size)
        for at, number in enumerate((self.images, *strides)):
            made.n[at] = number
        return made
