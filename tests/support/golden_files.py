"""Golden files: decisions of an earlier run, kept byte for byte. `pytest --bless` keeps the present ones instead."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LIMIT_BYTES = 60_000
"""So that a difference can still be read."""


def agree(path: Path, made: bytes, bless: bool) -> None:
    """Compare with a golden file, line by line, since the first line that differs says most; or write it anew."""
    if bless:
        assert len(made) <= LIMIT_BYTES, f"{path.name} would have {len(made)} bytes"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(made)
    golden = path.read_bytes()
    for number, (line, expected) in enumerate(zip(made.splitlines(), golden.splitlines(), strict=False), start=1):
        assert line == expected, f"{path.name} differs first in line {number}"
    assert made == golden, f"{path.name} ends otherwise"
