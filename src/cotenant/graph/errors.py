"""What can be wrong with a graph."""

from cotenant.errors import CotenantError


class GraphError(CotenantError):
    """A model file cannot be read as a graph, or does not fit what was asked of it."""


class MixedRowsError(GraphError):
    """Units cannot run in chunks of the rows: says which operator or tensor stands against it."""
