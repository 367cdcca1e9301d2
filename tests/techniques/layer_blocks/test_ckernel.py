"""Generated kernels against numpy, on any shape, on every vector width, in any number of parts."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel, text_of
from cotenant.techniques.layer_blocks.compile.knobs import Knobs, block_bytes, draw, parallelism_of, tasks_of
from cotenant.techniques.layer_blocks.compile.native import KernelStep, address, aligned_copy
from cotenant.techniques.layer_blocks.compile.packing import Array, from_blocks, pack_weights, to_blocks
from cotenant.techniques.layer_blocks.compile.problem import ACTIVATIONS, Activation, Problem, product
from cotenant.techniques.layer_blocks.compile.store import Store
from cotenant.techniques.layer_blocks.compile.target import AVX2, AVX512, PORTABLE, Target, this_target
from cotenant.techniques.layer_blocks.compile.trial import Trial
from kernels import a_compiler, a_store, activated, convolved

PARAMETERS = {"clip": (-0.5, 0.8), "leaky": (0.1,), "silu": (1.702,), "hard_sigmoid": (0.2, 0.5)}
ANY_ACTIVATION = st.sampled_from([Activation(kind, PARAMETERS.get(kind, ())) for kind in ACTIVATIONS])
SLOW = settings(max_examples=14, deadline=None, suppress_health_check=list(HealthCheck))
"""A compiler runs for every example."""


def runnable() -> list[Target]:
    """The targets whose instructions this processor has."""
    here = this_target()
    return [here, *{AVX512: [AVX2, PORTABLE], AVX2: [PORTABLE]}.get(here, [])]


def outcome(trial: Trial, store: Store, knobs: Knobs, parts: int = 1) -> Array:
    """What a kernel makes of a trial: [images, filters, rows, columns]. The rim must stay zero."""
    compiler = a_compiler()
    library = store.load(CKernel(compiler).make(trial.problem, knobs, store).library)
    run = library.kernel
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_long, ctypes.c_long), None
    step: KernelStep = trial.step(address(library))
    trial.out[...] = 0
    for part in reversed(range(parts)):
        run(ctypes.addressof(step), part, parts)
    if trial.problem.rows:
        return trial.out.transpose(0, 2, 1)[:, :, None, :]
    halo = trial.problem.out_halo
    inner = from_blocks(trial.out, trial.problem.filters, halo)
    rimmed = to_blocks(from_blocks(trial.out, trial.out.shape[1] * store.target.lanes, halo), store.target.lanes, halo)
    assert np.array_equal(rimmed, trial.out), "the rim was written"
    return inner


def check(problem: Problem, store: Store, knobs: Knobs, images: int = 1, parts: int = 1) -> None:
    trial = Trial(problem, store.target.lanes, images)
    added = trial.plain_added if problem.adds else None
    expected = convolved(problem, trial.values, trial.weights, trial.bias, added)
    got = outcome(trial, store, knobs, parts)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


@st.composite
def convolutions(draw_: st.DrawFn) -> Problem:
    groups = draw_(st.sampled_from([1, 1, 2, 3, 8, 16]))
    kind = draw_(st.sampled_from(["dense", "depthwise", "pixels"]))
    channels, filters = (draw_(st.integers(1, 40)) for _ in range(2))
    if kind == "depthwise":
        groups = channels = filters = max(2, channels)
    elif kind == "pixels":
        groups, channels = 1, min(channels, 4)
    else:
        channels, filters = groups * max(1, channels // groups), groups * max(1, filters // groups)
    kernel = (draw_(st.integers(1, 5)), draw_(st.integers(1, 5)))
    pads = tuple(draw_(st.integers(0, 3)) for _ in range(4))
    dilation = (1, 1) if kind == "pixels" else (draw_(st.integers(1, 3)), draw_(st.integers(1, 3)))
    return Problem(
        channels,
        filters,
        draw_(st.integers((kernel[0] - 1) * dilation[0] + 1, 14)),
        draw_(st.integers((kernel[1] - 1) * dilation[1] + 1, 17)),
        kernel,
        (draw_(st.integers(1, 3)), draw_(st.integers(1, 3))),
        (pads[0], pads[1], pads[2], pads[3]),
        groups,
        draw_(ANY_ACTIVATION),
        draw_(st.booleans()),
        max(pads) + draw_(st.integers(0, 1)),
        draw_(st.integers(0, 2)),
        draw_(st.integers(0, 2)),
        kind == "pixels",
        dilation=dilation,
    )


@SLOW
@given(convolutions(), st.integers(0, 9), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))
def test_convolutions_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, problem: Problem, seed: int, images: int, parts: int, width: int
) -> None:
    target = runnable()[width % len(runnable())]
    store = a_store(tmp_path_factory.mktemp("store"), target)
    check(problem, store, draw(problem, target, 1, seed)[0], images, parts)


@SLOW
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), ANY_ACTIVATION, st.booleans(), st.integers(0, 9))
def test_products_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    columns: int,
    depth: int,
    activation: Activation,
    adds: bool,
    seed: int,
) -> None:
    problem = product(rows, columns, depth, activation=activation, adds=adds)
    target = this_target()
    check(problem, a_store(tmp_path_factory.mktemp("store")), draw(problem, target, 1, seed)[0], 2, 3)


@pytest.mark.parametrize("order", ["weights", "pixels"])
@pytest.mark.parametrize("axis", ["filters", "pixels"])
def test_channels_may_be_summed_up_in_passes(tmp_path: Path, order: str, axis: str) -> None:
    store = a_store(tmp_path)
    problem = Problem(70, 50, 9, 11, (3, 3), (2, 1), (1, 1, 0, 1), 1, Activation("relu"), True, 1, 1, 0)
    check(problem, store, Knobs(2, 2, 4, 2, 1, 2, axis, order, 2), 2, 5)  # type: ignore[arg-type]
    rows = product(7, 64, 100, activation=Activation("gelu"), adds=True)
    check(rows, store, Knobs(3, 1, 5, 4, 1, 1, axis, order, 3), 2, 2)  # type: ignore[arg-type]


def test_activations_are_exact_over_their_whole_range(tmp_path: Path) -> None:
    """One channel in, one out, weight 1: the kernel is the activation."""
    compiler, store = a_compiler(), a_store(tmp_path)
    runtime = store.runtime(lambda: compiler)
    x = np.concatenate([np.linspace(-100, 100, 4001), np.linspace(-1, 1, 4001)]).astype(np.float32)
    lanes = store.target.lanes
    blocks = aligned_copy(to_blocks(x[None, None, None, :], lanes, 0))
    for number, kind in enumerate(ACTIVATIONS):
        out = aligned_copy(blocks)
        step = KernelStep(run=runtime.moves["apply"])
        step.p[0], step.p[4] = blocks.ctypes.data, out.ctypes.data
        step.n[0], step.n[4], step.n[5], step.n[6], step.n[9] = 1, 1, 1, len(x), number
        function = Activation(kind, PARAMETERS.get(kind, ()))
        for at, value in enumerate(function.parameters):
            step.f[at] = value
        runtime.cpu_ns((KernelStep * 1)(step))
        got = from_blocks(out, 1, 0).ravel()
        np.testing.assert_allclose(got, activated(function, x), rtol=3e-6, atol=3e-7, err_msg=kind)


def test_what_is_drawn_fits_and_differs() -> None:
    problem = Problem(64, 64, 56, 56, (3, 3), (1, 1), (1, 1, 1, 1), in_halo=1)
    drawn = draw(problem, AVX512, 20, 1)
    assert len(set(drawn)) == 20
    assert drawn == draw(problem, AVX512, 20, 1)
    assert drawn != draw(problem, AVX512, 20, 2)
    assert all(14 <= k.blocks * k.rows * k.columns <= 28 for k in drawn)
    assert {k.axis for k in drawn} == {"filters", "pixels"}


def test_parallelism_and_locality_are_counted() -> None:
    """By hand: 4 blocks of filters in tiles of 2, 8 rows in tiles of 2; 2 tiles of rows a task."""
    problem = Problem(32, 64, 8, 8, (3, 3), (1, 1), (1, 1, 1, 1), in_halo=1)
    knobs = Knobs(2, 2, 4, 8, 1, 2)
    assert tasks_of(problem, knobs, AVX512) == 2 * 2
    assert parallelism_of(problem, knobs, AVX512) == 4 * (2 * 2 * 4) * 8
    weights, read, written = 2 * 16 * 32 * 9, 32 * 6 * 10, 2 * 16 * 4 * 8
    assert block_bytes(problem, knobs, AVX512) == 4 * (weights + read + written)


def test_a_dilated_layer_reads_more_rows() -> None:
    """By hand: filters of 3 x 3 with two pixels between their taps span 7 x 7; 4 rows of output read 10."""
    problem = Problem(32, 64, 8, 8, (3, 3), (1, 1), (3, 3, 3, 3), in_halo=3, dilation=(3, 3))
    assert problem.extent == (7, 7)
    assert (problem.out_height, problem.out_width) == (8, 8)
    knobs = Knobs(2, 2, 4, 8, 1, 2)
    weights, read, written = 2 * 16 * 32 * 9, 32 * 10 * 14, 2 * 16 * 4 * 8
    assert block_bytes(problem, knobs, AVX512) == 4 * (weights + read + written)


def test_weights_of_odd_groups_lie_where_their_channels_are() -> None:
    problem = Problem(6, 9, 1, 1, groups=3)
    weights = np.arange(1, 19, dtype=np.float32).reshape(9, 2, 1, 1)
    packed = pack_weights(problem, weights, 4)  # blocks of filters, span, 1, 1, channels, filters
    assert packed.shape == (3, 2, 1, 1, 4, 4)
    whole = packed.transpose(0, 5, 1, 4, 2, 3).reshape(12, 8)
    assert np.count_nonzero(whole) == 18
    assert whole[4, 2:4].tolist() == [9, 10]  # filter 4 is of group 1, which reads channels 2 and 3


def test_a_wrong_problem_is_refused() -> None:
    for change in (
        {"groups": 3},
        {"pads": (1, 0, 0, 0)},
        {"kernel": (9, 1)},
        {"pixels": True, "groups": 2},
        {"pixels": True, "dilation": (2, 1)},
        {"kernel": (3, 3), "dilation": (3, 1)},
    ):
        with pytest.raises(InvalidValueError):
            Problem(**({"channels": 4, "filters": 4, "height": 5, "width": 5} | change))
    with pytest.raises(InvalidValueError, match="activation: kind is"):
        Activation("relu6")


def test_a_text_is_the_same_each_time() -> None:
    problem = Problem(16, 16, 4, 4)
    assert text_of(problem, Knobs(1, 1, 4), AVX512) == text_of(problem, Knobs(1, 1, 4), AVX512)
