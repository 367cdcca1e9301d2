"""Candidates under pressure: on antagonists that are made up, and on real ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.measure.antagonist import Streamed
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.selection import KernelVersion, pick
from cotenant.techniques.layer_blocks.measure.version_pressure import (
    LEVELS,
    PressureBench,
    at_levels,
    pressure_bench,
    versions_by_level,
)
from kernels import a_compiler, a_store

GB = 10**9
LAYER = Problem(16, 16, 8, 8, (3, 3), pads=(1, 1, 1, 1), in_halo=1)


class MadeUp:
    """An antagonist that draws 2 GB/s and disturbs nobody."""

    under_way = 0

    def start(self) -> None:
        MadeUp.under_way += 1

    def stop(self) -> Streamed:
        MadeUp.under_way -= 1
        return Streamed(2 * GB, GB)


def test_each_candidate_is_timed_beside_none_some_and_all(tmp_path: Path) -> None:
    """Every second antagonist doubles what the first candidate takes, and leaves the second one alone."""
    compiler, store = a_compiler(), a_store(tmp_path)
    candidates = search(LAYER, store, CKernel(compiler), SearchEffort(2))
    asked: list[tuple[int, int]] = []

    class Runtime:
        def cpu_ns(self, steps: Any, repeats: int = 1) -> list[int]:
            asked.append((MadeUp.under_way, repeats))
            return [1000 * (1 + MadeUp.under_way // 2), 3000]

    others: list[Any] = [MadeUp() for _ in range(8)]
    times = PressureBench(others, 16 * GB).times(LAYER, candidates, store, Runtime())  # type: ignore[arg-type]
    first, second = (times[each.name] for each in candidates)
    assert first == (1000, 2000, 3000, 4000, 5000)
    assert second == (3000,) * LEVELS
    assert {count for count, _ in asked} == {0, 2, 4, 6, 8}
    half = PressureBench(others, 32 * GB).times(LAYER, candidates, store, Runtime())  # type: ignore[arg-type]
    assert half[candidates[0].name] == (1000, 3000, 5000, 5000, 5000), "they can make no more than half"
    assert versions_by_level(times) == [candidates[0].name] * 3 + [candidates[1].name] * 2


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1, 1e6)), min_size=1, max_size=6))
def test_levels_never_fall_and_stay_within_what_was_measured(points: list[tuple[float, float]]) -> None:
    made = at_levels([p for p, _ in points], [ns for _, ns in points])
    assert len(made) == LEVELS
    assert list(made) == sorted(made)
    assert min(ns for _, ns in points) <= made[0] * (1 + 1e-12)
    assert made[-1] <= max(ns for _, ns in points) * (1 + 1e-12)


def test_a_version_that_does_not_pay_is_not_kept() -> None:
    assert versions_by_level({"a": [10, 11, 12], "b": [11, 11, 11.9]}) == ["a"] * 3
    assert versions_by_level({"a": [10, 20, 40], "b": [12, 14, 16], "c": [30, 30, 15]}) == ["a", "b", "c"]


def test_a_version_is_that_of_its_level_and_the_first_one_is_whatever_is_fastest() -> None:
    fast, robust, wide = KernelVersion(1, 1, 100), KernelVersion(2, 8, 140), KernelVersion(3, 8, 120)
    versions = [fast, fast, robust, robust, robust, wide]
    assert [pick(versions, level, 1).address for level in range(5)] == [1, 1, 2, 2, 2]
    assert [pick(versions, level, 4).address for level in range(5)] == [3, 3, 2, 2, 2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="pressure needs another core")
def test_kernels_are_timed_beside_a_real_antagonist(tmp_path: Path) -> None:
    compiler, store = a_compiler(), a_store(tmp_path)
    candidates = search(LAYER, store, CKernel(compiler), SearchEffort(2))
    cores = sorted(os.sched_getaffinity(0))[:2]
    with pressure_bench(cores, 1 << 20) as bench:
        times = bench.times(LAYER, candidates, store, store.runtime(lambda: compiler))
    assert set(times) == {each.name for each in candidates}
    assert all(len(each) == LEVELS and min(each) > 0 and np.all(np.diff(each) >= 0) for each in times.values())
