"""The kernel generator: it writes C code, and the compiler of this machine builds it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from cotenant.techniques.layer_blocks.compile.ckernel import dense, depthwise
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.knobs import Knobs, block_bytes, draw, parallelism_of, tasks_of
from cotenant.techniques.layer_blocks.compile.native import KernelStep, address
from cotenant.techniques.layer_blocks.compile.packing import Array
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.store import KernelCandidate, Store
from cotenant.techniques.layer_blocks.compile.target import Target
from cotenant.techniques.layer_blocks.compile.toolchain import Compiler
from cotenant.techniques.layer_blocks.compile.trial import Trial

_ROUNDS, _LEAST_NS = 9, 200_000
"""Measurements of each candidate, and the least time of each in ns."""
_SEED = 1
_TOLERANCE = 1e-4
"""Tolerance relative to the largest number: candidates differ in the order of their sums only."""


class CKernel:
    """Builds and measures random candidates of a problem."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def build(self, problem: Problem, store: Store, effort: SearchEffort) -> list[KernelCandidate]:
        """Candidates of a problem, built and stored; stored ones are used again.

        After the deadline at most one is built. Raises CompileError when none can be.
        """
        drawn = draw(problem, store.target, effort.candidates, _SEED)
        built: list[KernelCandidate] = []
        errors: list[CompileError] = []
        with ThreadPoolExecutor(max(1, effort.workers)) as pool:

            def build(at: int) -> None:
                if at and time.monotonic() > effort.deadline:
                    return
                try:
                    built.append(self.make(problem, drawn[at], store))
                except CompileError as error:
                    errors.append(error)

            list(pool.map(build, range(len(drawn))))
        if not built:
            raise errors[0]
        return built

    def make(self, problem: Problem, knobs: Knobs, store: Store) -> KernelCandidate:
        """Build one kernel, unless it is stored. Raises CompileError."""
        text = text_of(problem, knobs, store.target)
        key = self._key(text, store)
        known = store.whole(key)
        if known is not None:
            return known
        flags = store.target.flags
        made = KernelCandidate(
            problem,
            knobs,
            store.built(key, partial(self._compiler.build, text, flags=flags)),
            tasks_of(problem, knobs, store.target),
            parallelism_of(problem, knobs, store.target),
            block_bytes(problem, knobs, store.target),
        )
        store.keep(made)
        return made

    def measure(self, problem: Problem, store: Store, built: Sequence[KernelCandidate]) -> list[KernelCandidate]:
        """The candidates with their times, stored: CPU time of one core in ns, lower quartile of interleaved runs.

        Candidates with other results than the first one are removed. Raises CompileError when all results are NaN.
        """
        runtime = store.runtime(lambda: self._compiler)
        trial = Trial(problem, store.target.lanes)
        steps: list[KernelStep] = []
        kept: list[KernelCandidate] = []
        first: Array | None = None
        for each in built:
            step = trial.step(address(store.load(each.library)))
            trial.out[...] = 0
            took = runtime.cpu_ns((KernelStep * 1)(step))[0]
            if not np.isfinite(trial.out).all():  # inputs are finite; a NaN would pass the comparison below
                continue
            if first is None:
                first = trial.out.copy()
            elif np.max(np.abs(trial.out - first)) > _TOLERANCE * max(1.0, float(np.max(np.abs(first)))):
                continue
            kept.append(each)
            steps.append(step)
        if not kept:
            raise CompileError(f"no kernel for {problem} gives finite numbers; use another compiler: set CC")
        repeats = max(1, _LEAST_NS // max(1, took))
        row = (KernelStep * len(steps))(*steps)
        samples = [runtime.cpu_ns(row, repeats) for _ in range(_ROUNDS)]
        times = np.quantile(np.array(samples), 0.25, axis=0, method="lower")
        return [store.measured(each, int(ns)) for each, ns in zip(kept, times, strict=True)]

    def is_current(self, candidate: KernelCandidate, store: Store) -> bool:
        """Whether a build now would give the same key: same text, flags, compiler and processor."""
        return candidate.library.key == self._key(text_of(candidate.problem, candidate.knobs, store.target), store)

    def _key(self, text: str, store: Store) -> str:
        return store.key_of(text, *store.target.flags, self._compiler.version)


def text_of(problem: Problem, knobs: Knobs, target: Target) -> str:
    """The C code of a kernel."""
    write = depthwise.source if problem.is_depthwise else dense.source
    return write(problem, knobs, target)
