"""The little TOML that plan files need, written so that `tomllib` reads back the same values."""

from __future__ import annotations

import json
from collections.abc import Iterable

_WHOLE_FLOATS = 1e15
"""Whole floats below it are written as integers, which are exact there."""


def scalar(value: str | int | float) -> str:
    """A string, integer or finite float."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE_FLOATS:
        return str(int(value))
    return repr(value)


def array(items: Iterable[str | int]) -> str:
    """An array on one line; texts are values that were written before."""
    return f"[{', '.join(map(str, items))}]"


def line(key: str, value: str | int | float) -> str:
    """`key = value`."""
    return f"{key} = {scalar(value)}"
