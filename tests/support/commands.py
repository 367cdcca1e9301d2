"""Running commands of cotenant in the process of the tests: see the fixture `run`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from cotenant.cli import main

Run = Callable[..., tuple[int, str, str]]
"""Takes the arguments of a command; gives its status, standard output and standard error."""


def runner(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: Callable[[], None] = main
) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["cotenant", *map(str, arguments)])
        capfd.readouterr()
        status: Any = 0
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            command()
        except SystemExit as stop:
            status = stop.code or 0
        finally:  # the end of a command is that of its process
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capfd.readouterr()
        return status, out, err

    return call
