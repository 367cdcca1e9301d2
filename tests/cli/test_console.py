"""Text from outside is printed as it is: no bracket is markup, no word between colons is a picture."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table

import cotenant
from cotenant.cli.console import console, print_left_out, print_warnings

SOURCES = sorted(Path(cotenant.__file__).parent.rglob("*.py"))
FROM_OUTSIDE = [
    'add [[model.shapes]] with a line like x = [1, 3, "h"]',
    "[/] closes nothing",
    "[bold red]loud[/bold red]",
    "[link=http://x]here[/link]",
    "a :boom: b :warning:",
    "half [open",
    "\\[escaped]",
]


@pytest.mark.parametrize("text", FROM_OUTSIDE)
def test_lines_tables_and_reasons_are_printed_as_they_are(text: str) -> None:
    made = console()
    made.file = StringIO()
    table = Table("model", "error", title=text)
    table.add_row(text, text)
    made.print(text)
    made.print(table)
    print_left_out(made, {text: text})
    print_warnings(made, [text])
    made.rule(text)
    lines = made.file.getvalue().splitlines()
    assert sum(line.count(text) for line in lines) == 8


def test_consoles_are_made_in_one_place_without_markup() -> None:
    """And columns of progress, which have a switch of their own."""
    makers = [path for path in SOURCES if re.search(r"\bConsole\(", path.read_text("utf-8"))]
    assert [path.name for path in makers] == ["console.py", "pictures.py"]
    for path in SOURCES:
        text = path.read_text("utf-8")
        for column in re.findall(r"TextColumn\((.*)\)", text):
            assert "{" not in column or "markup=False" in column, path
        assert not re.search(r"\[/?(red|green|yellow|bold|dim)\]|from_markup|rich\.markup", text), path


def test_a_step_in_a_bar_is_text() -> None:
    made = console()
    with Progress(TextColumn("{task.description}", markup=False), console=made, disable=True) as bar:
        task = bar.add_task(FROM_OUTSIDE[0])
        column = bar.columns[0]
        assert isinstance(column, TextColumn)
        assert column.render(bar.tasks[task]).plain == FROM_OUTSIDE[0]
