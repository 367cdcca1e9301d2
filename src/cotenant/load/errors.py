"""Errors of the load generator."""

from __future__ import annotations

from cotenant.errors import CotenantError


class LoadError(CotenantError):
    """Load cannot be generated: no server, unknown model, or no input for it."""
