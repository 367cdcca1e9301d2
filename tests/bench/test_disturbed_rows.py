"""Rows of benchmarks that other processes disturbed: headline figures leave them out, and the run says how many."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench import _disturbed, _overload, goodput
from bench._disturbed import KEY, core_time, disturbed, disturbed_text, undisturbed
from bench._report import report
from cotenant.measure.busy import CoreTime


def rows(*pct: float | None) -> list[dict[str, Any]]:
    return [{"contender": "edf", "load": 1.0, "x": at, KEY: each} for at, each in enumerate(pct)]


def test_disturbed_rows_are_left_out_of_medians() -> None:
    found = [*rows(60.0, 5.0, None, 5.1, 90.0), {"contender": "edf", "load": 1.0, "x": 30}]
    assert [row["x"] for row in undisturbed(found)] == [1, 2, 30]
    assert _overload.median(found, "x") == goodput._median(found, "edf", 1.0, "x") == 2
    assert disturbed_text(found) == (
        "3 of 4 rows with a load are disturbed (other processes took more than 5 % of the cores); "
        "medians leave them out where others remain."
    )


def test_a_run_without_a_quiet_row_says_so() -> None:
    found = rows(60.0, 7.0, 90.0)
    assert undisturbed(found) == found
    assert disturbed_text(found).startswith("All 3 rows with a load are disturbed")


@pytest.mark.parametrize("found", [[], rows(0.0, 5.0), rows(None), [{"x": 1}]])
def test_a_quiet_run_says_nothing(found: list[dict[str, Any]]) -> None:
    assert disturbed_text(found) == ""


def test_a_row_has_the_share_since_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([CoreTime(10.0, 1.0), CoreTime(30.0, 3.0), CoreTime(30.0, 3.0)])
    monkeypatch.setattr(_disturbed._CLOCK, "read", readings.__next__)
    before = core_time()
    assert disturbed(before) == {KEY: 10.0}
    assert disturbed(CoreTime(30.0, 3.0)) == {KEY: None}
    assert _disturbed._CLOCK._root() == os.getpid()


def test_the_report_of_results_says_it_too(tmp_path: Path) -> None:
    record = {"name": "goodput", "summary": {"x": 1.0}, "date": "2026-11-27", "device": {"processor": "none"}}
    (tmp_path / "goodput.json").write_text(json.dumps({**record, "rows": rows(60.0, 1.0)}), encoding="utf-8")
    assert report(tmp_path).splitlines()[-1].startswith("goodput: 1 of 2 rows with a load are disturbed")
    (tmp_path / "goodput.json").write_text(json.dumps({**record, "rows": rows(1.0)}), encoding="utf-8")
    assert "disturbed" not in report(tmp_path)
