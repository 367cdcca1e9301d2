"""Errors of compiled kernels."""

from __future__ import annotations

from cotenant.errors import CotenantError


class CompileError(CotenantError):
    """A kernel cannot be built or used here. The message names the cause and a remedy."""
