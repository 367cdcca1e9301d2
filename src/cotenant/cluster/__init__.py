"""Multi-node serving of one plan: agents and a controller on Ray, and a gateway that forwards queries to nodes."""
