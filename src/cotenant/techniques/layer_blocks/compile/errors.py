"""What can be wrong with compiled kernels."""

from __future__ import annotations

from cotenant.errors import CotenantError


class CompileError(CotenantError):
    """No kernel can be made here, or one that was made cannot be used: says why, and what would mend it."""
