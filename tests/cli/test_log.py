"""Logs: lines for people on a terminal, JSON elsewhere, and the level that was asked for."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from cotenant.log import LEVEL, log_to_stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_terminal_gets_lines_and_a_file_gets_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        log_to_stderr()
        logging.getLogger("cotenant.server").info("model %r is served", "a")
        text = stream.getvalue()
        if stream.isatty():
            assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    model 'a' is served\n", text)
        else:
            assert json.loads(text)["message"] == "model 'a' is served"


@pytest.mark.parametrize(("level", "count"), [("error", 1), ("warning", 2), ("INFO", 3), ("debug", 4), ("loud", 3)])
def test_the_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, level: str, count: int) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv(LEVEL, level)
    log_to_stderr()
    log = logging.getLogger("cotenant.server")
    for write in (log.debug, log.info, log.warning, log.error):
        write("a line")
    assert len(stream.getvalue().splitlines()) == count
