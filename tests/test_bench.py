"""The benchmarks' harness: what it finds, what it prints, what it keeps. Figures are not asserted."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks are no part of the installed package

from bench import _record, _registry, _report
from bench.__main__ import main
from bench._registry import BenchError, benchmarks

FIELDS = ["name", "command", "date", "device", "versions", "seeds", "summary", "rows"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "results"
    monkeypatch.setattr(_record, "RESULTS", folder)
    monkeypatch.setattr(_record.save, "__defaults__", (folder,))
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two benchmarks, one of them in a sub-package and with a name of its own."""
    folder = tmp_path / "madeup"
    (folder / "papers" / "one").mkdir(parents=True)
    code = '"""{about}\n\nMore.\n"""\n{name}\n\ndef run(quick, data_dir):\n    print("a table")\n    return {result}\n'
    result = "{'summary': {'quick': int(quick), 'bad': float('nan')}, 'rows': [{'dir': data_dir}], 'seeds': (1, 2)}"
    (folder / "first.py").write_text(code.format(about="First.", name="", result=result))
    (folder / "papers" / "one" / "fig.py").write_text(
        code.format(about="Second.", name='NAME = "one-fig"', result=result)
    )
    (folder / "_helper.py").write_text("def run(quick, data_dir): ...\n")
    (folder / "table.py").write_text("def walk(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_registry.benchmarks, "__defaults__", (folder, "madeup"))
    return folder


def test_lists_every_benchmark_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert {"decision", "footprint", "frontend", "goodput", "overhead", "segments", "simspeed"} <= set(names)
    assert names == sorted(names)
    assert all(len(line.split()) > 3 for line in lines)


def test_every_benchmark_can_be_loaded() -> None:
    for benchmark in benchmarks().values():
        assert callable(benchmark.load())


def test_finds_modules_in_subpackages_and_names_with_dashes(package: Path) -> None:
    found = benchmarks()
    assert {name: (each.about, each.module) for name, each in found.items()} == {
        "first": ("First.", "madeup.first"),
        "one-fig": ("Second.", "madeup.papers.one.fig"),
    }


def test_two_modules_of_one_name_are_an_error(package: Path) -> None:
    (package / "other.py").write_text("NAME = 'first'\n\ndef run(quick, data_dir): ...\n")
    with pytest.raises(BenchError, match=r"'first' is in first\.py and in other\.py"):
        benchmarks()


def test_unknown_name_is_one_sentence_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "'nothing'" in captured.err
    assert "frontend" in captured.err


def test_json_is_the_last_line_and_a_full_run_is_kept(
    package: Path, results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTENANT_DATA", "/from/the/variable")
    assert main(["one-fig", "--json"]) == 0
    table, line = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert table == "a table"
    assert list(record) == FIELDS
    assert record["name"] == "one-fig"
    assert record["command"] == "python -m bench one-fig --json"
    assert record["summary"] == {"quick": 0, "bad": None}
    assert record["rows"] == [{"dir": "/from/the/variable"}]
    assert record["seeds"] == [1, 2]
    assert record["versions"]["cotenant"]
    assert record["device"]["cores"] >= 1
    assert all(pace > 0 for pace in record["device"]["pace_us"])
    assert json.loads((results / "one-fig.json").read_text()) == record


def test_a_quick_run_or_one_without_json_keeps_nothing(
    package: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["first"]) == 0
    assert capsys.readouterr().out == "a table\n"
    assert main(["first", "--quick", "--json", "--data", "here"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["summary"]["quick"] == 1
    assert record["rows"] == [{"dir": "here"}]
    assert not results.exists()


def test_report_is_a_table_of_what_is_kept(tmp_path: Path) -> None:
    assert "No results" in _report.report(tmp_path)
    result: dict[str, Any] = {"summary": {"small": 0.12341, "large": 12345.6, "lost": math.inf}, "rows": []}
    _record.save(_record.make_record("one", "python -m bench one --json", result, (2000.0, 3000.0)), tmp_path)
    _record.save(_record.make_record("two", "python -m bench two --json", result), tmp_path)
    lines = _report.report(tmp_path).splitlines()
    assert lines[0] == "| benchmark | metric | value | date | device | pace |"
    assert lines[2].endswith("| 1 | 2.50 |")
    assert lines[5].endswith("| 1 | - |")
    assert [line.split(" | ")[1:3] for line in lines[2:5]] == [
        ["`small`", "0.1234"],
        ["`large`", "12,346"],
        ["`lost`", "-"],
    ]
    assert lines[-1].startswith("1. processor ")


def test_the_cheapest_benchmark_runs(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decision", "--quick", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["summary"]
    assert record["rows"]
    assert all(isinstance(value, int | float) for value in record["summary"].values())


def test_the_peers_routes_cannot_be_taken_for_its_own() -> None:
    from bench.peers import mlserver_process

    assert mlserver_process.MODEL_PREFIX.endswith("/")
    assert [tuning.workers for tuning in mlserver_process.tunings(2)] == [0, 1, 2]
