"""Kernels that TVM finds: what traces say, on data; and the back end, where TVM is installed."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cotenant.techniques.layer_blocks.compile.backend import SearchEffort
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.problem import Activation, Problem, product
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.selection import Reading, single_pass
from cotenant.techniques.layer_blocks.compile.store import Built, KernelCandidate
from cotenant.techniques.layer_blocks.compile.trial import Trial
from cotenant.techniques.layer_blocks.compile.tvm import backend as tvm_backend
from cotenant.techniques.layer_blocks.compile.tvm.backend import TvmSearch
from cotenant.techniques.layer_blocks.compile.tvm.traces import TracedKnobs, read_trace, task_bytes
from cotenant.techniques.layer_blocks.execute.loaded_kernels import version_of
from cotenant.techniques.layer_blocks.measure.compile_campaign import backend_of
from kernels import a_store, convolved

CONV = Problem(64, 64, 28, 28, (3, 3), (1, 1), (1, 1, 1, 1), in_halo=1)
needs_tvm = pytest.mark.skipif(
    importlib.util.find_spec("tvm") is None, reason="apache-tvm is not installed: pip install 'cotenant[tvm]'"
)


def a_trace(fused: int = 6) -> list[Any]:
    """What MetaSchedule of TVM 0.27 writes for CONV in blocks of 8, on the lines that matter."""
    tiles = [[1, 8, 1, 1], [1, 14, 2, 1], [2, 1, 14, 1], [2, 1, 2, 2], [2, 4], [1, 3], [1, 3], [2, 4]]
    instructions: list[Any] = [
        ["GetSBlock", [], ["layer", "main"], ["b0"]],
        ["Annotate", ["b0", '"SSRSRS"'], ["meta_schedule.tiling_structure"], []],
        ["GetLoops", ["b0"], [], [f"l{at}" for at in range(8)]],
    ]
    decisions: list[Any] = []
    loops = []
    for at, tile in enumerate(tiles):
        decisions.append([len(instructions), tile])
        made = [f"v{at}_{part}" for part in range(len(tile))]
        instructions.append(["SamplePerfectTile", [f"l{at}"], [len(tile), 64], made])
        loops += [f"s{at}_{part}" for part in range(len(tile))]
        instructions.append(["Split", [f"l{at}", *made], [1, 0], loops[-len(tile) :]])
    instructions.append(["Reorder", loops, [], []])
    instructions.append(["Annotate", ["b1", 128], ["meta_schedule.parallel"], []])
    decisions.append([len(instructions), 2])
    instructions.append(["SampleCategorical", [], [[0, 16, 64, 512], [0.25] * 4], ["v58"]])
    instructions.append(["EnterPostproc", [], [], []])
    after = [f"l{60 + at}" for at in range(24)]
    instructions.append(["GetLoops", ["b60"], [], after])
    instructions.append(["Fuse", after[:fused], [1], ["l86"]])
    instructions.append(["Parallel", ["l86"], [], []])
    instructions.append(["Fuse", after[-1:], [1], ["l87"]])
    instructions.append(["GetLoops", ["b61"], [], ["l88", "l89", "l90", "l91"]])
    instructions.append(["Fuse", ["l88", "l89", "l90", "l91"], [1], ["l92"]])
    return json.loads(json.dumps([instructions, decisions]))  # type: ignore[no-any-return]


def test_a_trace_says_tiles_parallel_extent_and_unrolling() -> None:
    """By hand: filters 1, rows 1, columns 2, lanes 2 outermost; then 8 of filters and 14 of rows are fused as well."""
    knobs = read_trace(a_trace(), "0.27.0", "x86-64-v3")
    assert knobs.tiles[0] == (1, 8, 1, 1)
    assert knobs.tiles[-1] == (2, 4)
    assert (knobs.fused, knobs.unroll, knobs.version, knobs.target) == (6, 64, "0.27.0", "x86-64-v3")
    assert knobs.tasks == 1 * 1 * 2 * 2 * 8 * 14
    assert knobs.parallelism == knobs.tasks * 64
    assert knobs.task_tile() == [1, 2, 14, 4]
    filters, read = 4, (2 + 2) * (14 + 2)
    assert task_bytes(CONV, knobs, 8) == 4 * (filters * 64 * 9 + read * 64 + filters * 2 * 14)
    few = read_trace(a_trace(2))
    assert few.tasks == 1
    assert few.task_tile() == [8, 28, 28, 8]


def test_tasks_make_the_whole_layer_between_them() -> None:
    for fused in range(9):
        knobs = read_trace(a_trace(fused)) if fused else TracedKnobs(read_trace(a_trace()).tiles, 0, 0)
        assert knobs.tasks * np.prod(knobs.task_tile()) == 64 * 28 * 28


@pytest.mark.parametrize(
    "change", [lambda t: t[1].pop(0), lambda t: t[0].pop(3), lambda t: t.pop(), lambda t: t[0].clear()]
)
def test_a_trace_of_another_form_is_refused(change: Any) -> None:
    trace = a_trace()
    change(trace)
    with pytest.raises(CompileError, match=r"trace of TVM .*; install the version that the extra tvm names"):
        read_trace(trace)


def test_candidates_of_both_back_ends_are_of_one_form(tmp_path: Path) -> None:
    knobs = read_trace(a_trace())
    store = a_store(tmp_path)
    library = Built("k", "d", store.maker, 1.0)
    made = KernelCandidate(CONV, knobs, library, knobs.tasks, knobs.parallelism, 9, 5, "version_3")
    store.keep(made)
    again = a_store(tmp_path)
    assert again.candidates(CONV, "tvm") == [made]
    assert again.candidates(CONV) == []
    assert again.find("k:version_3") == made
    assert msgspec.json.decode(msgspec.json.encode(made), type=KernelCandidate) == made
    with pytest.raises(CompileError, match=r"k:version_3 was made by tvm, whose kernels no model runs"):
        version_of(again, made)


def test_without_tvm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm_backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r"apache-tvm, which is missing; run: pip install 'cotenant\[tvm\]'"):
        backend_of("tvm")


@needs_tvm
@pytest.mark.parametrize(
    "problem",
    [
        Problem(16, 24, 9, 9, (3, 3), (2, 1), (1, 1, 1, 1), 1, Activation("relu"), True, in_halo=1),
        Problem(16, 16, 9, 9, (3, 3), (1, 1), (2, 2, 2, 2), 16, in_halo=2, dilation=(2, 2)),
        product(5, 20, 17, activation=Activation("gelu")),
    ],
)
def test_what_tvm_finds_is_right_and_read_right(tmp_path: Path, problem: Problem) -> None:
    from cotenant.techniques.layer_blocks.compile.tvm import tuning

    store, backend = a_store(tmp_path), TvmSearch()
    found = search(problem, store, backend, SearchEffort(3))
    assert found
    assert len({each.library.key for each in found}) == 1, "all versions are in one library"
    assert all(each.cpu_ns and each.parallelism >= each.tasks for each in found)
    trial, given = Trial(problem, store.target.lanes), backend.arguments(problem, store)
    added = trial.plain_added if problem.adds else None
    expected = convolved(problem, trial.values, trial.weights, trial.bias, added)[0]
    for each in found:
        call, out = backend.call(each, store, given)
        call()
        got = out.numpy().transpose(0, 3, 1, 2).reshape(-1, *expected.shape[1:])[: problem.filters]
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    (folder,) = (store.folder / tvm_backend.TUNING).iterdir()
    extents = set()
    for record in tuning.records_of(folder):
        schedule = tuning.tvm.s_tir.Schedule(record.workload.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
        loops = re.findall(r"T.parallel\((\d+)", schedule.mod.script())
        tasks = read_trace(record.trace.as_json()).tasks
        assert str(tasks) in loops or tasks == 1
        extents.add(tasks)
    assert extents == {each.tasks for each in found}
    readings = [Reading(each.name, each.cpu_ns, each.parallelism, each.locality) for each in found]
    assert set(single_pass(readings, 1e12)) <= {each.name for each in found}
    began = time.monotonic()
    assert search(problem, store, backend, SearchEffort(3, deadline=began)) == found
    more = search(problem, store, backend, SearchEffort(5))
    assert len(more) > len(found), "a search is taken up where it stopped"
