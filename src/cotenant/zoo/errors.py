"""Error of the zoo."""

from cotenant.errors import CotenantError


class ZooError(CotenantError):
    """A model cannot be built, found or used. The text has the model, the expected state and a hint."""
