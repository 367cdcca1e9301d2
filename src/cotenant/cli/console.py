"""Consoles for tables and progress, without markup: names and errors of models may contain brackets and colons."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from cotenant.measure.verdict import ModelVerdict

_PIPED_WIDTH = 140
_LEAST_WIDTH = 40


def console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """A console without markup. Its width for a pipe or file is COLUMNS, or wide enough for most tables."""
    made = Console(quiet=quiet, stderr=stderr, markup=False, emoji=False)
    if not made.is_terminal and not os.environ.get("COLUMNS"):
        made.width = _PIPED_WIDTH
    made.width = max(_LEAST_WIDTH, made.width)
    return made


def print_left_out(console: Console, errors: Mapping[str, str]) -> None:
    """Print the models that were left out, with the reasons; lines are not wrapped, to be copied."""
    for model, error in errors.items():
        console.print(Text.assemble((f"{model} was left out:", "red"), f" {error}"), soft_wrap=True)


def print_verdicts(console: Console, verdicts: Iterable[ModelVerdict]) -> None:
    """Print all problems and warnings, each below the name of its model; lines are not wrapped, to be copied."""
    for verdict in verdicts:
        name = f"{verdict.model} {verdict.version}".rstrip()
        for kind, style, sentences in (("problem", "red", verdict.problems), ("warning", "yellow", verdict.warnings)):
            for sentence in sentences:
                console.print(Text.assemble((f"{name}: {kind}:", style), f" {sentence}"), soft_wrap=True)


def print_warnings(console: Console, warnings: Iterable[str]) -> None:
    """Print each warning on its own line."""
    for warning in warnings:
        console.print(warning, style="yellow")
