"""Another maker of kernels in a process of its own: pools of threads that spin in one process ruin each other.

Run with the name, the number of cores and a folder; takes lines of JSON, answers each with one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.target import this_target
from cotenant.techniques.layer_blocks.compile.trial import Trial

TVM_TRIALS = 2
TVM_PACKAGES = "apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1"
"""Releases with interfaces that the search uses; 0.3 GB."""
_REST_S = 0.004
"""After a turn on several cores: threads that wait for more work spin so long at most."""


class Yardstick:
    """Runs layers on `name` (`onednn` or `tvm`) with so many cores. `note` says why it cannot, if it cannot."""

    def __init__(self, name: str, cores: Sequence[int], folder: Path) -> None:
        self.name, self._cores = name, cores
        self.note = ""
        self._process: subprocess.Popen[str] | None = None
        count = str(len(cores))
        environment = {**os.environ, "OMP_NUM_THREADS": count, "TVM_NUM_THREADS": count}
        # A thread a core, as with all others here. One that spins for long keeps a core that its fellow waits for.
        environment |= {"OMP_PROC_BIND": "true", "OMP_PLACES": ",".join(f"{{{core}}}" for core in cores)}
        environment |= {"GOMP_SPINCOUNT": "20000"}
        call = [sys.executable, "-m", __spec__.name, name, ",".join(map(str, cores)), str(folder)]
        self._process = subprocess.Popen(
            call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.note = self._answer().get("note", "")

    def open(self, problem: Problem, *, may_search: bool = True) -> str:
        """Have a layer ready; gives why it cannot be."""
        if self.note:
            return self.note
        return str(self._ask({"open": msgspec.to_builtins(problem), "may_search": may_search}).get("note", ""))

    def sample(self) -> int:
        """Run the layer once, then once more; the ns of that: CPU time on one core, wall time on more."""
        found = int(self._ask({"run": 1})["ns"])
        if len(self._cores) > 1:
            time.sleep(_REST_S)
        return found

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.note = f"{self.name} ended with status {self._process.wait(30)}"
            return {"note": self.note, "ns": 0}
        return dict(json.loads(line))


def timed(call: Callable[[], object], *, is_wall: bool) -> int:
    """A call, then one more, which is timed."""
    clock = time.perf_counter_ns if is_wall else time.thread_time_ns
    call()
    began = clock()
    call()
    return clock() - began


Opener = Callable[[Problem, bool], Callable[[], object]]


def _onednn(_: Sequence[int], __: Path) -> Opener | str:
    from bench.papers.veltair import _onednn as onednn

    lib = onednn.library()
    if lib is None:
        return f"pip install {onednn.PACKAGE}"
    engine = onednn.OneDnn(lib)

    def opened(problem: Problem, _: bool) -> Callable[[], object]:
        trial = Trial(problem, 8)
        call, result = engine.convolution(problem, trial)
        call()
        _check(problem, trial, result())
        return call  # type: ignore[no-any-return]

    return opened


def _tvm(cores: Sequence[int], folder: Path) -> Opener | str:
    if importlib.util.find_spec("tvm") is None:
        return f"pip install {TVM_PACKAGES}"
    from bench.papers.veltair import _tvm, _tvm_tuning

    def opened(problem: Problem, may_search: bool) -> Callable[[], object]:
        target = this_target()
        if not may_search and not _tvm.is_tuned(problem, target, folder):
            raise RuntimeError("not tuned before")
        found = _tvm.TvmKernel(problem, target, folder, TVM_TRIALS if may_search else 1)
        _tvm_tuning.use_cores(cores)
        found.call()
        got = found.out.numpy().transpose(0, 3, 1, 2).reshape(-1, problem.out_height, problem.out_width)
        _check(problem, Trial(problem, target.lanes), got[: problem.filters])
        return found.call

    return opened


def _check(problem: Problem, trial: Trial, got: Any) -> None:
    """One pixel of the output by hand, so that no yardstick is timed at something else."""
    y, x = problem.out_height // 2, problem.out_width // 2
    (top, left), (high, wide) = problem.pads[:2], problem.extent
    most = max(problem.pads)
    padded = np.pad(trial.values[0].astype(np.float64), ((0, 0), (most, most), (most, most)))
    row, column = y * problem.stride[0] + most - top, x * problem.stride[1] + most - left
    down, right = problem.dilation
    window = padded[:, row : row + high : down, column : column + wide : right]
    grouped = window.reshape(problem.groups, -1)
    filters = trial.weights.astype(np.float64).reshape(problem.groups, problem.filters // problem.groups, -1)
    made = np.einsum("gk,gfk->gf", grouped, filters).ravel() + trial.bias
    if problem.adds:
        made += trial.plain_added[0, :, y, x]
    if problem.activation.kind:
        low, high_ = (*problem.activation.parameters, 0.0, np.inf)[:2] if problem.activation.parameters else (0, np.inf)
        made = np.clip(made, low, high_)
    np.testing.assert_allclose(got[:, y, x], made, rtol=1e-3, atol=1e-3)


def main(name: str, cores: Sequence[int], folder: Path) -> None:
    os.sched_setaffinity(0, cores)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    made = {"onednn": _onednn, "tvm": _tvm}[name](cores, folder)
    say({"note": made} if isinstance(made, str) else {})
    call: Callable[[], object] | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "run" in asked:
            assert call is not None
            say({"ns": timed(call, is_wall=len(cores) > 1)})
            continue
        assert not isinstance(made, str)
        try:
            call = made(msgspec.convert(asked["open"], Problem), asked["may_search"])
        except Exception as error:  # the row stays empty, and says so
            say({"note": f"{type(error).__name__}: {error}"[:200]})
        else:
            say({})


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1], tuple(map(int, sys.argv[2].split(","))), Path(sys.argv[3]))
