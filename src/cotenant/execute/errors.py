"""Errors of models and of the tensors that they are given."""

from __future__ import annotations

from pathlib import Path

from cotenant.errors import CotenantError


class ModelError(CotenantError):
    """A model cannot be loaded or run. The message names the file and the reason, and gives a hint."""

    def __init__(self, path: Path, reason: str, hint: str) -> None:
        super().__init__(f"model {path}: {reason}. {hint}".removesuffix(". "))
        self.path = path
        self.reason = reason
        self.hint = hint


class WorkerLostError(ModelError):
    """The process that loads a model ended before the load did; the model need not be the cause."""


class TensorError(CotenantError, ValueError):
    """A tensor for a model is missing, unknown, or of the wrong type or shape. The message gives the expected one."""


class RowsError(ValueError):
    """Rows of a batch do not fit: the batch fails, since no row can be assigned to its query."""
