"""NaN and infinities on kernels: what they come to by numpy, in every activation, group and pool."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.errors import InvalidValueError
from cotenant.techniques.layer_blocks.compile.ckernel import backend
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.knobs import Knobs, draw
from cotenant.techniques.layer_blocks.compile.native import KernelStep, Runtime, address, aligned_copy
from cotenant.techniques.layer_blocks.compile.packing import Array, from_blocks, pack_bias, pack_weights, to_blocks
from cotenant.techniques.layer_blocks.compile.problem import ACTIVATIONS, Activation, Problem
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.store import Store
from cotenant.techniques.layer_blocks.compile.trial import Trial
from kernels import a_compiler, a_store, activated, convolved

BOUNDS = ((0.0, None), (None, 1.0), (None, None), (-0.5, 0.8))
ALL = [
    *(Activation("clip", bounds) for bounds in BOUNDS),
    *(Activation(kind, (0.3,) * count) for kind, count in ACTIVATIONS.items() if kind != "clip"),
]
NANS = np.array([0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFC00000, 0x7FC0A5A5], np.uint32).view(np.float32)
"""Quiet ones, of several payloads and signs."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    a_compiler()
    return a_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def runtime(store: Store) -> Runtime:
    return store.runtime(a_compiler)


def expected(function: Activation, x: Array) -> Array:
    low, high = function.parameters if function.kind == "clip" else (None, None)
    if function.kind == "clip":
        sides = Activation("", ())
        bounded = np.minimum(np.maximum(x, -math.inf if low is None else low), math.inf if high is None else high)
        return activated(sides, bounded)
    with np.errstate(invalid="ignore", over="ignore"):
        return activated(function, x)


def applied(runtime: Runtime, function: Activation, x: Array, lanes: int) -> Array:
    """By the step without weights."""
    from cotenant.techniques.layer_blocks.compile.ckernel.moves import NUMBER_OF

    blocks = aligned_copy(to_blocks(x[None, None, None, :], lanes, 0))
    out = aligned_copy(blocks)
    step = KernelStep(run=runtime.moves["apply"])
    step.p[0], step.p[4] = blocks.ctypes.data, out.ctypes.data
    step.n[0], step.n[4], step.n[5], step.n[6], step.n[9] = 1, 1, 1, len(x), NUMBER_OF[function.kind]
    for at, value in enumerate(function.parameters):
        step.f[at] = (-math.inf, math.inf)[at] if value is None else value
    runtime.cpu_ns((KernelStep * 1)(step))
    return from_blocks(out, 1, 0).ravel()


def fused(store: Store, runtime: Runtime, function: Activation, x: Array, groups: int = 1) -> Array:
    """By a kernel of 1 x 1 whose weight is 1: a dense one, or with 2 groups a depthwise one."""
    problem = Problem(groups, groups, 1, len(x), groups=groups, activation=function)
    trial = Trial(problem, store.target.lanes)
    lanes = store.target.lanes
    values = np.repeat(x[None, None, None, :], groups, axis=1)
    trial.input[...] = to_blocks(values, lanes, 0)
    trial.packed_weights[...] = pack_weights(problem, np.ones((groups, 1, 1, 1), np.float32), lanes)
    trial.packed_bias[...] = pack_bias(problem, None, lanes)
    library = store.load(CKernel(a_compiler()).make(problem, Knobs(1, 1, 4), store).library)
    runtime.cpu_ns((KernelStep * 1)(trial.step(address(library))))
    return from_blocks(trial.out, groups, 0)[0, -1].ravel()


@pytest.mark.parametrize("function", ALL, ids=lambda each: f"{each.kind}{each.parameters}")
def test_activations_keep_nan_and_take_infinities(store: Store, runtime: Runtime, function: Activation) -> None:
    x = np.concatenate([NANS, [np.inf, -np.inf, 1.0, -1.0, 0.0]]).astype(np.float32)
    right = expected(function, x)
    for got in (
        applied(runtime, function, x, store.target.lanes),
        fused(store, runtime, function, x),
        fused(store, runtime, function, x, 2),
    ):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
        np.testing.assert_allclose(got, right, rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("seed", range(12))
def test_convolutions_keep_what_is_of_other_channels_out(store: Store, runtime: Runtime, seed: int) -> None:
    """An infinity, and a NaN, in one channel reach the filters that read it alone, whatever fills up blocks."""
    rng = np.random.default_rng(seed)
    groups = int(rng.choice([1, 2, 3, 5, 8]))
    channels, filters = (groups * int(rng.integers(1, 9)) for _ in range(2))
    pads = tuple(int(each) for each in rng.integers(0, 2, 4))
    kernel = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    problem = Problem(channels, filters, 4, 5, kernel, (1, 1), pads, groups, in_halo=1)  # type: ignore[arg-type]
    trial = Trial(problem, store.target.lanes)
    weights = np.where(rng.random(trial.weights.shape) < 0.1, -0.0, trial.weights).astype(np.float32)
    trial.packed_weights[...] = pack_weights(problem, weights, store.target.lanes)
    for special in (np.nan, np.inf, -np.inf):
        values = trial.values.copy()
        values[0, rng.integers(channels), rng.integers(4), rng.integers(5)] = special
        blocks = to_blocks(values, store.target.lanes, 1)
        inner = blocks[:, -1, 1:-1, 1:-1, (channels - 1) % store.target.lanes + 1 :]
        inner[...] = special  # a kernel before may leave anything in what fills up the last block
        trial.input[...] = blocks
        with np.errstate(invalid="ignore"):
            right = convolved(problem, values, weights, trial.bias, None)
        knobs = draw(problem, store.target, 1, seed)[0]
        library = store.load(CKernel(a_compiler()).make(problem, knobs, store).library)
        runtime.cpu_ns((KernelStep * 1)(trial.step(address(library))))
        got = from_blocks(trial.out, filters, 0)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", range(9))
def test_a_pool_keeps_nan_wherever_it_stands(store: Store, runtime: Runtime, place: int) -> None:
    x = np.arange(9, dtype=np.float32)
    x[place] = np.nan
    low = np.full(9, -np.inf, np.float32)
    assert np.isnan(pooled(store, runtime, x))
    assert pooled(store, runtime, low) == -np.inf
    low[place] = 1.0
    assert pooled(store, runtime, low) == 1.0


def pooled(store: Store, runtime: Runtime, x: Array) -> float:
    """The largest of 3 x 3."""
    blocks = aligned_copy(to_blocks(x.reshape(1, 1, 3, 3), store.target.lanes, 0))
    out = aligned_copy(np.zeros((1, 1, 1, 1, store.target.lanes), np.float32))
    step = KernelStep(run=runtime.moves["pool"])
    step.p[0], step.p[4] = blocks.ctypes.data, out.ctypes.data
    numbers = {0: 1, 4: 1, 5: 3, 6: 3, 11: 1, 12: 1, 13: 3, 14: 3, 15: 1, 16: 1}
    for at, number in numbers.items():
        step.n[at] = number
    runtime.cpu_ns((KernelStep * 1)(step))
    return float(from_blocks(out, 1, 0).item())


def test_native_code_refuses_steps_that_lack_something(runtime: Runtime) -> None:
    assert runtime.cpu_ns((KernelStep * 0)()) == []
    whole = np.zeros(64, np.float32)
    for lacking in ("run", 0, 4):
        steps = (KernelStep * 3)()
        for step in steps:
            step.run, step.p[0], step.p[4] = runtime.moves["copy"], whole.ctypes.data, whole.ctypes.data
        if lacking == "run":
            steps[1].run = None
        else:
            steps[1].p[lacking] = None
        with pytest.raises(CompileError, match="step 1 cannot run: it lacks its function, its input or its output"):
            runtime.cpu_ns(steps)
        block = runtime.block()
        with pytest.raises(CompileError, match="step 1 cannot run"):
            runtime.run(block, steps, 0, 3)
        assert runtime.run(block, steps, 2, 3) == 1, "the block goes on to serve"


@pytest.mark.parametrize("kind", [kind for kind, count in ACTIVATIONS.items() if count])
def test_parameters_are_finite_and_only_a_clip_has_no_bound(kind: str) -> None:
    count = ACTIVATIONS[kind]
    for value in (math.inf, -math.inf, math.nan, *([] if kind == "clip" else [None])):
        with pytest.raises(InvalidValueError, match="finite parameters"):
            Activation(kind, (1.0,) * (count - 1) + (value,))


def test_candidates_of_a_clip_without_bound_are_kept(tmp_path: Path) -> None:
    store, problem = a_store(tmp_path), Problem(1, 1, 1, 1, activation=Activation("clip", (0.0, None)))
    made = CKernel(a_compiler()).make(problem, Knobs(), store)
    assert a_store(tmp_path).candidates(problem) == [made]


def test_kernels_that_make_nan_of_numbers_are_no_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN compares as equal to everything: it is looked for by itself."""
    store, problem = a_store(tmp_path), Problem(3, 5, 4, 4)
    right = backend.text_of

    def broken(*given: Any) -> str:
        return right(*given).replace("act(vec x) { return x; }", 'act(vec x) { return x * __builtin_nanf(""); }')

    monkeypatch.setattr(backend, "text_of", broken)
    with pytest.raises(CompileError, match="gives finite numbers"):
        search(problem, store, CKernel(a_compiler()), SearchEffort(2))
