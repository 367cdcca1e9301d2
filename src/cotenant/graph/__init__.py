"""The operator graph of a model: data-flow graph, units, cuts, and readers of model files."""
