"""Tables at the widths of terminals: every cell is shown whole, and every column has its name."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import cotenant
from cotenant.report.fitted_table import FittedTable

NAMES = st.text("abcdefgh_[]/1", min_size=1, max_size=16)
NUMBERS = st.integers(0, 10**7).map(str)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    width=st.sampled_from([60, 80, 120, 140]),
    rows=st.lists(st.tuples(NAMES, st.lists(NUMBERS, min_size=14, max_size=14)), min_size=1, max_size=4),
    columns=st.integers(1, 14),
    title=st.text("abc []", max_size=20),
    boxed=st.booleans(),
)
def test_no_cell_is_cut(width: int, rows: list[tuple[str, list[str]]], columns: int, title: str, boxed: bool) -> None:
    heads = [f"column{at}" for at in range(columns)]
    table = (
        FittedTable("tenant", *heads, title=title) if boxed else FittedTable("tenant", *heads, title=title, box=None)
    )
    for name, cells in rows:
        table.add_row(name, *cells[:columns])
    console = Console(width=width, file=StringIO(), markup=False)
    console.print(table)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    words = text.replace("│", " ").replace("┃", " ").split()
    for word in [
        "tenant",
        *heads,
        *(name for name, _ in rows),
        *(cell for _, cells in rows for cell in cells[:columns]),
    ]:
        assert word in words


@pytest.mark.parametrize("width", [80, 120])
def test_long_texts_are_wrapped_not_cut(width: int) -> None:
    table = FittedTable("model", "remark")
    remark = "add [[model.shapes]] with a line like x = [1, 3, 224, 224], " * 4 + "x" * 200
    table.add_row("m" * 16, remark)
    console = Console(width=width, file=StringIO(), markup=False)
    console.print(table)
    assert isinstance(console.file, StringIO)
    text = re.sub(r"[\s│┃]", "", console.file.getvalue())
    assert re.sub(r"\s", "", remark[:40]) in text
    assert text.count("x") >= 200


def test_commands_print_no_other_tables() -> None:
    root = Path(cotenant.__file__).parent
    for path in sorted([*(root / "cli").glob("*.py"), *(root / "report").glob("*.py")]):
        if path.name != "fitted_table.py":
            assert not re.search(r"(?<![A-Za-z_])Table\(", path.read_text("utf-8")), path
