"""What can be wrong with a model or with the tensors it is given."""

from __future__ import annotations

from pathlib import Path

from cotenant.errors import CotenantError


class ModelError(CotenantError):
    """A model cannot be loaded or run: names the file, the reason and how to mend it."""

    def __init__(self, path: Path, reason: str, hint: str) -> None:
        super().__init__(f"model {path}: {reason}. {hint}".removesuffix(". "))
        self.path = path
        self.reason = reason
        self.hint = hint


class WorkerLostError(ModelError):
    """The process that loaded a model ended before it had loaded it: that need not be for what the model is."""


class TensorError(CotenantError, ValueError):
    """A tensor handed to a model is missing, unknown, or of the wrong type or shape: names it and what was expected."""


class RowsError(ValueError):
    """Rows of a batch do not fit: it must fail, since nobody can tell whose they are."""
