"""The error every part of the zoo raises."""

from cotenant.errors import CotenantError


class ZooError(CotenantError):
    """A model cannot be built, found or used; the message names the model, what was expected and how to mend it."""
