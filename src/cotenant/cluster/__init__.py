"""The same plan over several nodes: agents and a controller on Ray, and a gateway that sends queries to nodes."""
