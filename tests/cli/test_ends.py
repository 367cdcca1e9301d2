"""How commands end: whatever goes wrong is one sentence and a status, and no number is taken that has no sense."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cotenant.cli import EXIT_BROKEN_PIPE, EXIT_INTERNAL_ERROR, EXIT_INTERRUPTED, EXIT_USER_ERROR, status_of
from cotenant.cli.app import app
from cotenant.errors import ConfigError

LIMIT_S = 60


def raising(error: BaseException) -> Any:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("a.toml: no"), EXIT_USER_ERROR, "cotenant: a.toml: no\n"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, "cotenant: interrupted\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), EXIT_BROKEN_PIPE, ""),
        (OSError(errno.ENOENT, "No such file", "x"), EXIT_USER_ERROR, "cotenant: x: No such file\n"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            EXIT_USER_ERROR,
            "cotenant: standard output, a file or a connection: No space left on device\n",
        ),
        (OSError("odd"), EXIT_USER_ERROR, "cotenant: standard output, a file or a connection: odd\n"),
        (SystemExit(3), 3, ""),
        (SystemExit(), 0, ""),
    ],
)
def test_what_ends_a_command_is_a_sentence_and_a_status(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(raising(error)) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RecursionError(), MemoryError(), AssertionError()])
def test_a_fault_of_ours_leaves_its_traceback_in_a_file(
    error: Exception, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert status_of(raising(error)) == EXIT_INTERNAL_ERROR
    [line] = capsys.readouterr().err.splitlines()
    [file] = tmp_path.iterdir()
    assert str(file) in line
    assert "Traceback" in file.read_text("utf-8")
    assert type(error).__name__ in file.read_text("utf-8")


def test_output_that_cannot_be_written_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert status_of(lambda: print("x")) == EXIT_USER_ERROR
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "status", "out", "err"),
    [
        ("--version >&-", EXIT_USER_ERROR, "", "standard output is closed"),
        ("--version >/dev/full", EXIT_USER_ERROR, "", "No space left"),
        ("--version >/dev/full 2>&-", EXIT_USER_ERROR, "", ""),
        ("--version 2>&-", 0, "cotenant", ""),
    ],
)
def test_streams_that_are_closed_or_full(line: str, status: int, out: str, err: str) -> None:
    command = ["bash", "-c", f"{sys.executable} -m cotenant {line}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == status
    assert out in ended.stdout
    assert err in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
def test_a_terminal_of_few_characters_gets_others_in_their_place(encoding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    code = "from cotenant.cli import _open_streams; _open_streams(); print('\\u2013 \\u0141 \\udcff')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=LIMIT_S,
        check=True,
        env=environment,
    )
    assert b"?" in ended.stdout


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))
NUMERIC = re.compile(r"\b(int|float)\b")
NUMBERS = [
    (path, max(each.opts, key=len), each)
    for path, command in COMMANDS.items()
    for each in command.params
    if each.param_type_name == "option" and NUMERIC.search(str(each.type_descriptor.annotation))
]
PORTS = ("--http-port", "--grpc-port")
"""Options over a key of `cotenant.toml`, which has the bounds."""


@pytest.mark.parametrize(("path", "name", "option"), NUMBERS, ids=lambda each: each if isinstance(each, str) else "")
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e30", "-1e30", "9" * 5000, "-" + "9" * 5000])
def test_numbers_of_options_have_bounds(
    path: tuple[str, ...], name: str, option: Any, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(NUMBERS) > 10
    if name in PORTS and value in ("9" * 5000, "-" + "9" * 5000):
        pytest.skip("bounded by the key of the configuration")
    arguments = ["x"] * sum(each.param_type_name == "argument" for each in COMMANDS[path].params)
    with pytest.raises(SystemExit) as ended:
        app([*path, *arguments, name, value])
    assert ended.value.code == 2
    assert name in capsys.readouterr().err
