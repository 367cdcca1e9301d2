"""Names with brackets, backslashes and colons: what a command prints has every name that its JSON has, as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Run, runner
from cotenant.config import ServerConfig
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from processes import serving
from repositories import config, scaled, write_model

NAMES = ("[sixteen chars!]", "[/x]", "[bold]a[/bold]", "[red", ":boom: ]", "\\\\[b]")
"""Of tenants, each of which owns a model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profiled repository, two workloads (one of queries that are lost), a file of tenants, and a trace."""
    folder = tmp_path_factory.mktemp("brackets")
    root = folder / "models"
    loads = ""
    for number, name in enumerate(NAMES):
        model = f"[{number}] m"
        write_model(root, model, config(json.dumps(name)[1:-1], slo_ms=50), {1: lambda: scaled(1.0)})
        loads += f"[[tenant]]\nname = {json.dumps(name)}\nmodel = {json.dumps(model)}\nrate = 30\n"
    profile_repository(root, ServerConfig(), Effort(0.0, 3, 3, 1), fresh=False, on_step=lambda *_: None)
    (folder / "workload.toml").write_text(f"seed = 1\nduration_s = 1.0\n{loads}", encoding="utf-8")
    device = '[[device]]\nname = "[cpu]"\ncount = 2\ncores = 2\n'
    (folder / "tenants.toml").write_text(device + loads, encoding="utf-8")
    late = loads.replace("rate = 30", "rate = 30\ntimeout_ms = 0.01")
    (folder / "late.toml").write_text(f"seed = 1\nduration_s = 1.0\n{late}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[str, ...]]:
    """A server of the repository, as options of `cotenant load`."""
    with serving(folder / "models") as process:
        yield ("--http", process.url, "--grpc", f"127.0.0.1:{process.ready['grpc_port']}")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: Path) -> Run:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "400")
    return runner(monkeypatch, capfd)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for each in value.items() for text in texts(list(each)))
    elif isinstance(value, list):
        yield from (text for each in value for text in texts(each))


def prepared(run: Run, folder: Path, line: str, request: pytest.FixtureRequest) -> list[str]:
    """A command line whose trace is there, and whose server runs."""
    if line.startswith("load"):
        return [*line.split(), *request.getfixturevalue("server")]
    if " trace.jsonl" in line and not (folder / "trace.jsonl").exists():
        assert run("simulate", "late.toml", "models", "--trace", "trace.jsonl", "--json")[0] == 0
    return line.split()


LINES = pytest.mark.parametrize(
    "line",
    [
        "models models",
        "simulate workload.toml models --bound",
        "simulate late.toml models --bound --trace trace.jsonl",
        "plan tenants.toml --profiles models --quick",
        "explain --lost trace.jsonl",
        "explain 3 trace.jsonl",
        "bound trace.jsonl",
        "profile models",
        "load workload.toml",
    ],
)


@LINES
def test_text_has_the_names_of_the_json(run: Run, folder: Path, line: str, request: pytest.FixtureRequest) -> None:
    words = prepared(run, folder, line, request)
    status, out, _ = run(*words, "--json")
    assert status == 0
    told = json.loads(out.splitlines()[-1])
    named = [name for name in NAMES if name in set(texts(told))]
    assert named
    status, out, err = run(*words)
    assert (status, err) == (0, "")
    for name in named:
        assert name in out or repr(name)[1:-1] in out, name


@LINES
@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_no_cell_is_cut_in_a_terminal(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, columns: str, request: pytest.FixtureRequest
) -> None:
    words = prepared(run, folder, line, request)
    monkeypatch.setenv("COLUMNS", columns)
    status, out, _ = run(*words)
    assert status == 0
    assert "…" not in out
    tables = [each for each in out.splitlines() if each[:1] in "┏┃┡│├└"]
    assert all(len(each) <= int(columns) for each in tables)
    if line.startswith(("models", "simulate", "plan", "bound", "load")):
        assert NAMES[0] in out
