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
        *heads,
        *(name for name, _ in rows),
        *(cell for _, cells in rows for cell in cells[:columns]),
    ]:
        assert word in words


def printed(table: FittedTable, width: int) -> str:
    console = Console(width=width, file=StringIO(), markup=False)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def counts(name: str) -> FittedTable:
    table = FittedTable("tenant", "slowest answer", "failed", "remark", optional=["failed"])
    table.columns[1].justify = table.columns[2].justify = "right"
    table.add_row(name, "12345.6", "0", "")
    table.add_row("total", "0", "0", "", style="bold")
    return table


def test_only_columns_without_information_are_left_out() -> None:
    words = printed(counts("vision"), 80).split()
    assert {"tenant", "slowest", "answer", "vision", "12345.6", "total"} <= {*words}
    assert not {"failed", "remark"} & {*words}
    table = counts("vision")
    table.add_row("audio", "1", "2", "is slow")
    assert {"failed", "remark", "2", "slow"} <= {*printed(table, 80).split()}


def test_a_table_gives_up_its_frame_before_it_is_stacked() -> None:
    framed, narrow, stacked = (printed(counts("vision"), width) for width in (80, 18, 12))
    assert framed.startswith("┏")
    assert [line.split() for line in narrow.splitlines()] == [
        ["slowest"],
        ["tenant", "answer"],
        ["─" * 18],
        ["vision", "12345.6"],
        ["total", "0"],
    ]
    assert stacked.splitlines()[0] == "vision"
    assert "slowest answer" in " ".join(stacked.split())


def test_blocks_show_the_same_cell_in_the_same_place() -> None:
    table = FittedTable("tenant", *(head for at in range(6) for head in (f"count of {at}",)), "remark", title="Title")
    table.add_row("a" * 40, *"123456", "long words " * 10)
    table.add_row("b", *(str(10**at) for at in range(6)), "")
    lines = printed(table, 60).splitlines()
    assert lines[0] == "Title"
    assert lines[1] == "a" * 40
    first = next(line for line in lines if "count of 1 2" in line)
    second = next(line for line in lines if "count of 1 10" in line)
    assert first.index("count of 1") == second.index("count of 1")
    assert " ".join(" ".join(lines).split()).count("long words") == 10
    assert sum("remark" in line for line in lines) == 1
    assert max(map(len, lines)) <= 60


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
