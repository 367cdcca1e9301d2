"""The error every part of the zoo raises."""


class ZooError(Exception):
    """A model cannot be built, found or used; the message names the model, what was expected and how to mend it."""
