"""Errors of the load generator."""

from __future__ import annotations

from cotenant.errors import CotenantError


class LoadError(CotenantError):
    """Load cannot be generated: no server, no such model, no input for it."""
