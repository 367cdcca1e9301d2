"""Progress of commands on stderr: a line with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from cotenant.measure.campaign import OnStep

APPEARS_S = 2.0
"""Commands that end sooner print no progress."""
PAUSE_S = 10.0
"""Between two lines where stderr is no terminal."""


@contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[OnStep]:
    """Show progress of a block from APPEARS_S on; the value is the callback, with 0 steps in all where unknown.

    With `quiet` nothing is shown.
    """
    from cotenant.cli.console import console

    shown = Shown(what)
    if quiet:
        yield shown.update
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=shown.run, args=(console(stderr=True), ended.wait), name="cotenant-progress", daemon=True
    )
    thread.start()
    try:
        yield shown.update
    finally:
        ended.set()
        thread.join()


@contextmanager
def reading(path: Path, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """As `progress`, for reading a file; the value is called with the bytes read and the size of the file."""
    with progress(f"reading {path.name}", quiet=quiet) as on_step:
        yield lambda done, total: on_step(done, total, "")


def spent_of(budget_s: float, until_s: float) -> tuple[int, int]:
    """Steps done and all steps of a search that ends at `until_s` of the monotonic clock: tenths of seconds."""
    total = max(1, round(10 * budget_s))
    return min(total, max(0, total - round(10 * (until_s - time.monotonic())))), total


class Shown:
    """The progress of one block. `clock` is in seconds."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._began_s = clock()
        self._state = (0, 0, "")

    def update(self, done: int, total: int, text: str) -> None:
        """Set the state; on any thread."""
        self._state = (done, total, text)

    def run(self, console: Console, wait: Callable[[float], bool]) -> None:
        """Show the state until `wait`, which waits for so many seconds, returns True."""
        if wait(APPEARS_S):
            return
        if console.is_terminal and os.environ.get("TERM") != "dumb":
            self._draw(console, wait)
            return
        while True:
            with suppress(OSError):  # its reader is gone
                console.print(self.line(), highlight=False, soft_wrap=True)
            if wait(PAUSE_S):
                return

    def line(self) -> str:
        """The present state in words."""
        done, total, text = self._state
        spent_s = self._clock() - self._began_s
        if total > 0:
            left = f", {_words(spent_s / done * (total - done))} left" if done else ""
            state = f"{min(100.0, 100 * done / total):.0f} %{left}"
        else:
            state = f"for {_words(spent_s)}"
        return f"cotenant: {self._what}: {state}{f': {text}' if text else ''}"

    def _draw(self, console: Console, wait: Callable[[float], bool]) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        columns: tuple[Any, ...] = (
            TextColumn("{task.fields[what]}", markup=False),
            BarColumn(20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeLeft(),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
            task = bar.add_task("", total=None, what=self._what)
            is_over = False
            while not is_over:
                done, total, text = self._state
                bar.update(task, completed=done, total=total or None, description=text)
                is_over = wait(0.25)


def _words(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )
