"""The search over the kernels of one problem: candidates drawn at random, built, checked and measured in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cotenant.compile.errors import CompileError
from cotenant.compile.knobs import draw
from cotenant.compile.native import KernelStep, Runtime, address, aligned, aligned_copy
from cotenant.compile.packing import Array, blocks_of, pack_bias, pack_weights, to_blocks, to_pixels
from cotenant.compile.problem import Problem
from cotenant.compile.store import KernelCandidate, Store
from cotenant.compile.toolchain import Compiler

CANDIDATES = 20
"""Candidates of a problem: the best of them is within 1 % of the best of 40."""
_ROUNDS, _LEAST_NS = 9, 200_000
"""Measurements of each candidate, and how long each lasts at least."""
_SEED = 1
_TOLERANCE = 1e-4
"""Of the largest number: candidates differ in the order of their sums alone."""


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """How many candidates there are, and when (`time.monotonic`) no further one is begun."""

    candidates: int = CANDIDATES
    deadline: float = float("inf")
    workers: int = 1
    """Compilers that run at a time."""


class Trial:
    """Tensors of one problem with random numbers, and steps that run candidates on them."""

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
        self._input = aligned_copy(laid)
        self._weights = aligned_copy(pack_weights(p, self.weights, lanes))
        self._bias = aligned_copy(pack_bias(p, self.bias, lanes))
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
        for at, array in enumerate((self._input, self._weights, self._bias, self.added, self.out)):
            made.p[at] = array.ctypes.data
        apart = (self._input[0].size, self.added[0].size, self.out[0].size)
        for at, number in enumerate((self.images, *apart)):
            made.n[at] = number
        return made


def search(
    problem: Problem,
    store: Store,
    runtime: Runtime,
    compiler: Compiler,
    effort: SearchEffort = SearchEffort(),
    on_built: Callable[[KernelCandidate], None] = lambda _: None,
) -> list[KernelCandidate]:
    """Candidates for a problem with their times, the fastest first; those that the store has are taken from it.

    After the deadline nothing is built, and what is there is measured; at least one is built. Those that give another
    result than the first are left out. Raises CompileError when none can be built.
    """
    drawn = draw(problem, store.target, effort.candidates, _SEED)
    built: list[KernelCandidate] = []
    errors: list[CompileError] = []
    with ThreadPoolExecutor(max(1, effort.workers)) as pool:

        def build(at: int) -> None:
            if at and time.monotonic() > effort.deadline:
                return
            try:
                made = store.build(problem, drawn[at], compiler)
            except CompileError as error:
                errors.append(error)
            else:
                built.append(made)
                on_built(made)

        list(pool.map(build, range(len(drawn))))
    if not built:
        raise errors[0]
    if any(not each.cpu_ns for each in built):
        built = measure(problem, store, runtime, built)
    return sorted(built, key=lambda each: (each.cpu_ns, each.library.key))


def measure(
    problem: Problem, store: Store, runtime: Runtime, built: Sequence[KernelCandidate]
) -> list[KernelCandidate]:
    """Time candidates in turn, so that a disturbance hits all of them; drop those whose results differ."""
    trial = Trial(problem, store.target.lanes)
    steps: list[KernelStep] = []
    kept: list[KernelCandidate] = []
    first: Array | None = None
    for each in built:
        step = trial.step(address(store.load(each.library)))
        trial.out[...] = 0
        took = runtime.cpu_ns((KernelStep * 1)(step))[0]
        if first is None:
            first = trial.out.copy()
        elif np.max(np.abs(trial.out - first)) > _TOLERANCE * max(1.0, float(np.max(np.abs(first)))):
            continue
        kept.append(each)
        steps.append(step)
    repeats = max(1, _LEAST_NS // max(1, took))
    row = (KernelStep * len(steps))(*steps)
    samples = [runtime.cpu_ns(row, repeats) for _ in range(_ROUNDS)]
    times = np.quantile(np.array(samples), 0.25, axis=0, method="lower")
    return [store.measured(each, int(ns)) for each, ns in zip(kept, times, strict=True)]
