"""The yardsticks beside generated kernels: right where they are installed, empty rows with a reason where not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.papers.veltair import _onednn, _yardstick, kernels
from bench.papers.veltair._yardstick import Yardstick
from cotenant.techniques.layer_blocks.compile.problem import Activation, Problem
from cotenant.techniques.layer_blocks.compile.trial import Trial
from kernels import convolved

PROBLEM = Problem(16, 32, 9, 11, (3, 3), (2, 1), (1, 1, 0, 1), 1, Activation("relu"), True, 1)
needs_onednn = pytest.mark.skipif(
    _onednn.library() is None, reason=f"oneDNN is not installed: pip install {_onednn.PACKAGE}"
)


@needs_onednn
@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        Problem(
            24, 24, 8, 8, (3, 3), (1, 1), (2, 2, 2, 2), 24, Activation("clip", (0.0, 6.0)), in_halo=2, dilation=(2, 2)
        ),
        Problem(8, 8, 5, 5, groups=2),
    ],
)
def test_onednn_computes_the_layer(problem: Problem) -> None:
    lib = _onednn.library()
    assert lib is not None
    trial = Trial(problem, 8)
    call, result = _onednn.OneDnn(lib).convolution(problem, trial)
    call()
    added = trial.plain_added if problem.adds else None
    expected = convolved(problem, trial.values, trial.weights, trial.bias, added)[0]
    np.testing.assert_allclose(result(), expected, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_a_yardstick_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    made = Yardstick("onednn", (0,), tmp_path)
    assert made.note == ""
    assert made.open(PROBLEM) == ""
    assert made.sample() > 0
    assert "KeyError" in made.open(Problem(8, 8, 5, 5, activation=Activation("tanh")))
    made.close()


def test_what_is_checked_by_hand_is_the_layer() -> None:
    trial = Trial(PROBLEM, 8)
    right = convolved(PROBLEM, trial.values, trial.weights, trial.bias, trial.plain_added)[0].astype(np.float32)
    _yardstick._check(PROBLEM, trial, right)
    right[3, PROBLEM.out_height // 2, PROBLEM.out_width // 2] += 0.1
    with pytest.raises(AssertionError):
        _yardstick._check(PROBLEM, trial, right)


def test_a_yardstick_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Absent:
        """A process that answers as one without its package does, then is gone."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.stdin, self.stdout = open("/dev/null", "w"), iter(())  # noqa: SIM115
            self.stdout = type("Lines", (), {"readline": lambda _: self.lines.pop(0)})()
            self.lines = ['{"note": "pip install onednn-cpu-gomp"}\n', ""]

        def wait(self, _: float) -> int:
            return 3

    monkeypatch.setattr(subprocess, "Popen", Absent)
    others = kernels._Others(tmp_path, (0,), may_search=False)
    assert others.notes == dict.fromkeys(kernels.YARDSTICKS, "pip install onednn-cpu-gomp")
    assert others.ready(PROBLEM, 1) == {}
    others.close()


def test_a_yardstick_that_dies_leaves_a_reason() -> None:
    made = object.__new__(Yardstick)
    made.name, made.note = "tvm", ""

    class Dead:
        stdin = type("Sink", (), {"write": lambda *_: 0, "flush": lambda _: None})()
        stdout = type("Lines", (), {"readline": lambda _: ""})()

        def wait(self, _: float) -> int:
            return -4

    made._process = Dead()  # type: ignore[assignment]
    assert made.open(PROBLEM) == "tvm ended with status -4"
    assert made.open(PROBLEM) == "tvm ended with status -4"
