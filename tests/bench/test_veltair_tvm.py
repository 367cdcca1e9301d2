"""The yardstick TVM: its kernels compute the layer, where TVM is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from bench.papers.veltair import _yardstick
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.problem import Activation, Problem, product
from cotenant.techniques.layer_blocks.compile.target import this_target
from cotenant.techniques.layer_blocks.compile.trial import Trial
from kernels import convolved

needs_tvm = pytest.mark.skipif(
    importlib.util.find_spec("tvm") is None,
    reason=f"apache-tvm is not installed: pip install {_yardstick.TVM_PACKAGES}",
)


def test_without_tvm_its_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_yardstick.importlib.util, "find_spec", lambda name: None)
    assert _yardstick._tvm((0,), tmp_path) == f"pip install {_yardstick.TVM_PACKAGES}"


@needs_tvm
@pytest.mark.parametrize(
    "problem",
    [
        Problem(16, 24, 9, 9, (3, 3), (2, 1), (1, 1, 1, 1), 1, Activation("relu"), True, in_halo=1),
        Problem(16, 16, 9, 9, (3, 3), (1, 1), (2, 2, 2, 2), 16, in_halo=2, dilation=(2, 2)),
        product(5, 20, 17, activation=Activation("gelu")),
    ],
)
def test_what_tvm_finds_is_right_and_taken_up_again(tmp_path: Path, problem: Problem) -> None:
    from bench.papers.veltair import _tvm, _tvm_tuning

    target = this_target()
    assert not _tvm.is_tuned(problem, target, tmp_path)
    found = _tvm.TvmKernel(problem, target, tmp_path, 3)
    assert _tvm.is_tuned(problem, target, tmp_path)
    trial = Trial(problem, target.lanes)
    added = trial.plain_added if problem.adds else None
    expected = convolved(problem, trial.values, trial.weights, trial.bias, added)[0]
    found.call()
    got = found.out.numpy().transpose(0, 3, 1, 2).reshape(-1, *expected.shape[1:])[: problem.filters]
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    (folder,) = tmp_path.iterdir()
    before = _tvm_tuning.records_of(folder)
    _tvm.TvmKernel(problem, target, tmp_path, 1)
    assert len(_tvm_tuning.records_of(folder)) == len(before), "nothing is searched where there is enough"
    _tvm.TvmKernel(problem, target, tmp_path, len(before) + 2)
    assert len(_tvm_tuning.records_of(folder)) > len(before), "a search is taken up where it stopped"


@needs_tvm
def test_groups_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    from bench.papers.veltair import _tvm

    odd = Problem(12, 12, 9, 9, (3, 3), (1, 1), (1, 1, 1, 1), 4, in_halo=1)
    with pytest.raises(CompileError, match="whole blocks of channels"):
        _tvm.TvmKernel(odd, this_target(), tmp_path, 1)
