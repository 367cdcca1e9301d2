"""The operator graph of a model: data-flow graph, units, cuts, and loading them from files."""
