"""Which units of a model treat every row by itself, and graphs in which some of them run in chunks of the rows."""
