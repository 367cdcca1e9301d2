"""Results as tables of rows: for pandas, and for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

from cotenant.errors import CotenantError


class MissingPackageError(CotenantError, ImportError):
    """A function needs an optional package: names the package and the command that installs it."""


class Tabular:
    """Mixin of results that consist of rows. A subclass implements `rows`."""

    __slots__ = ()

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """One mapping of column names to plain values for each row; all rows have the same keys."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`. Raises MissingPackageError where pandas is not installed."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            text = f"{type(self).__name__}.to_pandas needs pandas: pip install pandas"
            raise MissingPackageError(text) from None
        return pandas.DataFrame(list(self.rows()))

    def _repr_html_(self) -> str:
        """The rows as an HTML table, which notebooks show."""
        rows = self.rows()
        heads = "".join(f"<th>{escape(name)}</th>" for name in (rows[0] if rows else ()))
        lines = "".join(f"<tr>{''.join(f'<td>{_cell(each)}</td>' for each in row.values())}</tr>" for row in rows)
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _cell(value: object) -> str:
    """A value as HTML text: four significant digits for fractions, nothing for None."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else escape(str(value))
