"""The benchmarks' harness: what it finds, what it prints, what it keeps. Figures are not asserted."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench import _record, _registry, _report, _reproduce
from bench.__main__ import main
from bench._data import DATA, paper_figure, read_rows
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


def test_kept_results_have_a_line_a_row(tmp_path: Path) -> None:
    result = {"summary": {"a": 1.5}, "rows": [{"x": [1, 2]}, {"x": {"y": None}}]}
    record = _record.make_record("one", "python -m bench one --json", result)
    text = _record.save(record, tmp_path).read_text(encoding="utf-8")
    assert json.loads(text) == record
    assert len(text.splitlines()) == len(FIELDS) + len(record["rows"]) + 2
    none = _record.make_record("none", "", {"summary": {}, "rows": []})
    assert json.loads(_record.save(none, tmp_path).read_text(encoding="utf-8")) == none


def test_the_data_is_that_of_the_repository_unless_another_is_named(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COTENANT_DATA", raising=False)
    assert main(["first", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == [{"dir": str(DATA)}]


def test_tables_of_the_repository_are_described_and_hold_one_kind() -> None:
    for path in DATA.rglob("*.csv"):
        about = (path.parent / "README.md").read_text(encoding="utf-8")
        assert path.name in about or (path.name.startswith("table") and "table" in about), path
        assert len(read_rows(path)) > 0
    assert not list(DATA.rglob("*.npz")), "weights have no licence to be here"


def test_a_papers_figure_is_found_by_name() -> None:
    found = paper_figure("Abacus", "Fig 22", "16 V100 cluster, MAF trace", "throughput gain over Clockwork, average")
    assert (found.text, found.where) == ("17.8 %", "Fig 22; 7.6")
    for unit, count in (("", 2), ("km", 0)):
        with pytest.raises(BenchError, match=rf"papers\.csv: has {count} rows of gpu-let, Fig 15"):
            paper_figure("gpu-let", "Fig 15", "glet+int vs ideal", "fewer schedulable scenarios", unit)


EXPERIMENT = '''"""Measures."""

from bench._data import Headline, paper_figure

PAPER = paper_figure("Abacus", "headline", "vs state of the art", "throughput gain, average")
HEADLINES = (
    Headline("gain", "gain", "x", "made up", PAPER, bound="most"),
    Headline("share", "part", "%", "of all", of="whole"),
    Headline("thorough", "full", "", "long"),
)


def run(quick, data_dir):
    {body}
'''


@pytest.fixture
def experiments(package: Path) -> Path:
    """Papers' experiments: one that works, one that fails, and one without figures of a paper."""
    folder = package / "papers" / "two"
    folder.mkdir()
    figures = "{'gain': 1.2345, 'most': 1.5, 'part': 1, 'whole': 4}"
    (folder / "works.py").write_text(EXPERIMENT.format(body=f"return {{'summary': {figures}, 'rows': []}}"))
    (folder / "absent.py").write_text(EXPERIMENT.format(body="return {'summary': {}, 'rows': []}"))
    (folder / "broken.py").write_text(EXPERIMENT.format(body="raise ValueError('[b]no[/b]')"))
    (folder / "odd.py").write_text("import nothing_of_that_name\n\n\ndef run(quick, data_dir): ...\n")
    return folder


def lines_of(printed: str, name: str) -> list[list[str]]:
    """The rows of the last table that are about an experiment, as cells."""
    lines = [line for line in printed.splitlines() if line.startswith(f"│ {name} ")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_figures_of_papers_are_printed_beside_ours(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--quick"]) == 0
    printed = capsys.readouterr().out
    gain, share, full = lines_of(printed, "works")
    assert gain == ["works", "Abacus", "abstract", "gain", "29.8 % (1.3 x)", "1.23 x", "-", "1.5 x", "made up"]
    assert share == ["works", "-", "-", "share", "-", "25 %", "-", "-", "of all"]
    assert full[-3:] == ["-", "-", "long; in full runs only"]
    assert all(cells[5] == "-" for name in ("absent", "broken") for cells in lines_of(printed, name))
    assert "broken: ValueError: [b]no[/b]" in printed
    assert "absent: it gave no figures" in printed
    assert "odd: ModuleNotFoundError" in printed
    assert not lines_of(printed, "one-fig")


def test_kept_figures_are_printed_without_a_run(
    experiments: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _record.make_record("works", "", {"summary": {"gain": 1.1}, "rows": []})
    _record.save(record, tmp_path)
    _reproduce.reproduce(tmp_path, committed=True, results=tmp_path)
    printed = capsys.readouterr().out
    assert lines_of(printed, "works")[0][5] == "1.1 x"
    assert f"broken: no result is kept in {tmp_path}" in "".join(printed.split("\n"))
    assert "took" not in printed
    _reproduce.reproduce(tmp_path, quick=True, results=tmp_path)
    assert lines_of(capsys.readouterr().out, "works")[0][5:7] == ["1.23 x", "1.1 x"]


def test_an_interrupted_reproduction_shows_what_it_has(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (experiments / "stopped.py").write_text(EXPERIMENT.format(body="raise KeyboardInterrupt"))
    assert main(["reproduce", "--quick"]) == 130
    printed = capsys.readouterr().out
    assert lines_of(printed, "stopped")[0][-1] == "interrupted"
    assert lines_of(printed, "works")[0][-1] == "interrupted before"


def test_an_interrupt_that_is_swallowed_still_ends_it(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swallow = """import os, signal
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
    return {'summary': {'gain': 1}, 'rows': []}"""
    (experiments / "deaf.py").write_text(EXPERIMENT.format(body=swallow))
    assert main(["reproduce", "--quick"]) == 130
    printed = capsys.readouterr().out
    assert lines_of(printed, "deaf")[0][5] == "-"
    assert lines_of(printed, "works")[0][-1] == "interrupted before"


def test_kept_results_have_every_headline() -> None:
    """A headline whose metric is no longer in the results would never be seen missing."""
    for benchmark in benchmarks().values():
        for each in getattr(importlib.import_module(benchmark.module), "HEADLINES", ()):
            summary = json.loads((_record.RESULTS / f"{benchmark.name}.json").read_text(encoding="utf-8"))["summary"]
            assert {each.ours, each.bound or each.ours, each.of or each.ours} <= set(summary), benchmark.name


@pytest.mark.parametrize("options", [["report", "--quick"], ["fetch", "--committed"], ["first", "--from", "x"]])
def test_an_option_of_something_else_is_refused(
    package: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    assert f"{options[0]} has no option {options[1]}" in capsys.readouterr().err


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


def test_triton_is_told_what_its_queues_may_hold(tmp_path: Path) -> None:
    from bench.peers import triton_process as triton
    from cotenant.zoo import build

    build("tiny", tmp_path / "model.onnx")
    served = triton.Served(tmp_path / "model.onnx", 8, 100_000_000, 12_000_000.0)
    plain = triton._config("tiny", served, triton.Tuning())
    assert "max_batch_size: 8" in plain
    assert 'input { name: "x" data_type: TYPE_FP32 dims: [16] }' in plain
    assert "dynamic_batching" not in plain
    queue = "timeout_action: REJECT default_timeout_microseconds: 50000 max_queue_size: 4"
    assert queue in triton._config("tiny", served, triton.Tuning(0.5))


def test_answers_over_tritons_are_of_medians_and_never_over_none() -> None:
    from bench import goodput

    def rows(at: str, **per_s: float) -> list[dict[str, object]]:
        return [{"contender": name, "pair": at, "goodput_per_s": each} for name, each in per_s.items()]

    made = [
        *rows("1x", shares=30.0, edf=33.0, triton_tuned=10.0, triton_default=0.0),
        *rows("1x", shares=20.0, edf=33.0, triton_tuned=20.0, triton_default=0.0),
        *rows("1x", shares=40.0, edf=33.0, triton_tuned=15.0, triton_default=0.0),
        *rows("tuning", triton_tuned=99.0),
    ]
    assert goodput._pair_summary(made, 20.0) == {
        "over_triton_tuned_1x": 2.0,
        "edf_over_triton_tuned_1x": 2.2,
        "over_triton_default_1x": 600.0,
    }
