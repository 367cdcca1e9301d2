"""One launch of a model over several devices at once, as a placement says."""
