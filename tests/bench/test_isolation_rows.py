"""The rows of the isolation benchmark, and what is made of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench._campaign import timed_rows
from bench._registry import BenchError
from bench.isolation import CALM, FRONTEND, ROWS, VICTIMS, judge, tasks_of


def test_the_default_form_has_one_mode_and_the_quick_form_both() -> None:
    full, quick = tasks_of(False, None, None), tasks_of(True, None, None)
    assert [kind for _, kind, _ in full] == list(ROWS)
    assert {count for _, kind, count in full if kind != FRONTEND} == {1}
    assert {count for _, kind, count in quick if kind == CALM} == {0, 1}
    for tasks in (full, quick):
        assert [at for at, _, _ in tasks] == list(range(len(tasks)))
        assert {count for _, kind, count in tasks if kind == FRONTEND} == {2}
        assert {count > 0 for _, kind, count in tasks if kind == CALM} == {count > 0 for _, _, count in tasks}


def test_a_mode_and_attacks_can_be_chosen() -> None:
    assert tasks_of(False, ["unread", "gzip"], 0) == [(0, CALM, 0), (1, "unread", 0), (2, "gzip", 0)]
    assert [task[1:] for task in tasks_of(True, None, 3)][:2] == [(CALM, 3), ("flood", 3)]
    assert len(tasks_of(True, None, 0)) == 4
    with pytest.raises(BenchError, match="no attack 'rain'; expected one of gzip"):
        tasks_of(False, ["rain"], None)


def row(kind: str, frontends: int, *attained: float, recovery_s: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "frontends": frontends, "recovery_s": recovery_s, **dict(zip(VICTIMS, attained, strict=True))}


def test_attacked_rows_are_held_against_the_calm_ones_of_their_mode() -> None:
    rows = [
        row(CALM, 1, 1.0, 0.9, 1.0),
        row(CALM, 0, 0.5, 0.5, 0.5),
        row("flood", 1, 1.0, 0.8, 0.95, recovery_s=0.5),
        row(FRONTEND, 2, 0.97, 0.9, 1.0, recovery_s=1.5),
        row("flood", 0, 0.5, 0.5, 0.25),
        row(CALM, 2, 1.0, 0.9, 1.0),
    ]
    summary = judge(rows)
    assert [round(each["drop_points"], 6) for each in rows if "drop_points" in each] == [10.0, 3.0, 25.0]
    assert summary["worst_victim_drop_points"] == 25.0
    assert summary["recovery_s"] == 1.5
    assert summary[f"calm_{VICTIMS[1]}"] == 0.9


def test_a_run_that_was_cut_short_goes_on_and_the_next_one_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[int] = []

    def measure(task: int) -> list[dict[str, Any]]:
        measured.append(task)
        if measured == [0, 1]:
            raise KeyboardInterrupt
        return [{"task": task}]

    def run(*, quick: bool = False) -> list[dict[str, Any]]:
        return timed_rows("some", [sys.modules[__name__]], [0, 1, 2], measure, str, quick=quick)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert run() == [{"task": 0}, {"task": 1}, {"task": 2}]
    assert measured == [0, 1, 1, 2]
    run()
    run(quick=True)
    assert measured[4:] == [0, 1, 2, 0, 1, 2]
