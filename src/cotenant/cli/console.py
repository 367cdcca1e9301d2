"""Where tables and progress go."""

from __future__ import annotations

from rich.console import Console

_PIPED_WIDTH = 140


def console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """A console; into a pipe or file it is wide enough for the tables."""
    made = Console(quiet=quiet, stderr=stderr)
    return made if made.is_terminal else Console(quiet=quiet, stderr=stderr, width=_PIPED_WIDTH)
