"""Errors that tell the user what is wrong, where, and what was expected."""

from __future__ import annotations

from typing import Any


class CotenantError(Exception):
    """Base of every error raised on purpose. Its text is meant for the user, in whatever process it was raised."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[CotenantError], arguments: tuple[object, ...], fields: dict[str, object]) -> CotenantError:
    """An error as it was, without its constructor, which may ask for something else than the text it made."""
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class InvalidValueError(CotenantError, ValueError):
    """A value is outside its range: names the place, the field, the value and what was expected."""

    def __init__(self, where: str, field: str, value: object, expected: str) -> None:
        super().__init__(f"{where}: {field} is {value!r}, expected {expected}")
        self.where = where
        self.field = field


class ConfigError(CotenantError):
    """A configuration file cannot be used: names the file, the key and what was expected."""


class PlanError(CotenantError):
    """A plan cannot be asked for or used: names the thing and what was expected."""


class ProtocolViolationError(CotenantError):
    """A component broke the contract of the core (a policy overbooked a core, an executor ended a launch twice)."""
