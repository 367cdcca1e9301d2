"""Errors for the user: each names the place, the value and the expected value."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class CotenantError(Exception):
    """Base of all errors that are raised deliberately. The text is for the user; errors can cross processes.

    An error with several arguments is several problems, a sentence each.
    """

    def __str__(self) -> str:
        return "\n".join(self.problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """The sentences of the text."""
        return tuple(map(str, self.args))

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[CotenantError], arguments: tuple[object, ...], fields: dict[str, object]) -> CotenantError:
    """Rebuild an error without its constructor, which may have other parameters than the text."""
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class InvalidValueError(CotenantError, ValueError):
    """A value is out of range: names the place, the field, the value and the expected values."""

    def __init__(self, where: str, field: str, value: object, expected: str) -> None:
        super().__init__(f"{where}: {field} is {value!r}, expected {expected}")
        self.where = where
        self.field = field


class ConfigError(CotenantError):
    """A configuration file is invalid: names the file, the key and the expected value."""


class PlanError(CotenantError):
    """A plan cannot be made or used: names the place and the expected value."""


class ProtocolViolationError(CotenantError):
    """A component broke the contract of the core (a policy overbooked a core, an executor ended a launch twice)."""


def expected_one_of(name: str, known: Iterable[str]) -> str:
    """End of a sentence on an unknown name: the known names, and the nearest of them, if any is similar."""
    names = list(known)
    near = get_close_matches(name, names, 1)
    return f"expected one of {', '.join(names)}" + (f"; did you mean {near[0]!r}?" if near else "")
