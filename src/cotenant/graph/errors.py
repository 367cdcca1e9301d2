"""Errors of graphs."""

from cotenant.errors import CotenantError


class GraphError(CotenantError):
    """A model file cannot be read as a graph, or does not fit the request."""


class MixedRowsError(GraphError):
    """Units cannot run in chunks of rows. The message names the operator or tensor that prevents it."""
