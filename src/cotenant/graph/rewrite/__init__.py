"""Row independence: which units of a model treat every row by itself."""
