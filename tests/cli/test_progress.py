"""Progress of commands: lines in pipes, a bar on terminals, nothing for short commands."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

import cotenant.cli.progress as progress_module
from cotenant.cli.app import app
from cotenant.cli.progress import APPEARS_S, PAUSE_S, Shown, progress, spent_of

SOURCES = Path(progress_module.__file__).parents[1]
REPORTING = {
    "cli": ("bound", "demo", "explain", "init", "load", "profile", "replay", "simulate"),
    "techniques/granularity": ("cli",),
    "techniques/layer_blocks": ("cli",),
    "techniques/overlap": ("cli",),
    "techniques/partitions/cli": ("plan", "profile_corun"),
    "techniques/placement": ("cli",),
}


class Waits:
    """A clock that passes as it is waited for; `steps` are done before each wait, and the last one ends."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        self.now_s, self.left, self.pauses = 0.0, list(steps), list[float]()

    def clock(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        if not self.left:
            return True
        self.pauses.append(seconds)
        self.now_s += seconds
        self.left.pop(0)()
        return False


def shown(*steps: tuple[int, int, str], terminal: bool = False) -> tuple[str, Waits]:
    waits = Waits()
    made = Shown("measuring", waits.clock)
    waits.left = [lambda step=step: made.update(*step) for step in steps]  # type: ignore[misc]
    written = io.StringIO()
    made.run(Console(file=written, force_terminal=terminal, width=80, markup=False), waits.wait)
    return written.getvalue(), waits


def test_what_ends_soon_prints_nothing() -> None:
    assert shown()[0] == ""
    with progress("nothing", quiet=True) as on_step:
        on_step(1, 2, "")


def test_a_pipe_gets_a_line_every_ten_seconds_without_control_characters() -> None:
    text, waits = shown((1, 4, "[a] one"), (2, 4, "b"), (3, 4, "c"))
    assert waits.pauses == [APPEARS_S, PAUSE_S, PAUSE_S]
    assert text.splitlines() == [
        "cotenant: measuring: 25 %, 6 s left: [a] one",
        "cotenant: measuring: 50 %, 12 s left: b",
        "cotenant: measuring: 75 %, 7 s left: c",
    ]
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def test_without_a_total_the_time_is_told_that_has_passed() -> None:
    text, _ = shown((0, 0, "searching"), *[(0, 0, "searching")] * 8)
    assert text.splitlines()[0] == "cotenant: measuring: for 2 s: searching"
    assert text.splitlines()[-1] == "cotenant: measuring: for 1 min 22 s: searching"


def test_a_terminal_gets_a_bar_that_is_removed_at_the_end() -> None:
    text, waits = shown(*[(5, 10, "tiny: 4 rows")] * 5, terminal=True)
    assert waits.pauses[1:] == [0.25] * 4
    assert "50%" in text
    assert "tiny: 4 rows" in text
    assert text.endswith("\x1b[2K")


def test_an_error_of_the_block_ends_the_progress() -> None:
    with pytest.raises(KeyboardInterrupt), progress("a block"):
        raise KeyboardInterrupt


def test_the_time_of_a_search_is_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: 104.0)
    assert spent_of(10.0, 110.0) == (40, 100)
    assert spent_of(10.0, 100.0) == (100, 100)
    assert spent_of(0.0, 104.0) == (1, 1)


@pytest.mark.parametrize(("folder", "names"), REPORTING.items())
def test_commands_that_may_take_long_report_progress(folder: str, names: tuple[str, ...]) -> None:
    assert app.registered_commands
    for name in names:
        text = (SOURCES / folder / f"{name}.py").read_text(encoding="utf-8")
        assert "with progress(" in text or "with reading(" in text or "progress(" in text, name
        assert ".status(" not in text, name
