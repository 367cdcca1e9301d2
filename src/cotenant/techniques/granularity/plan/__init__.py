"""Plans of models that start together: synchronisation pointers and chunks, found by what they are believed to take."""
