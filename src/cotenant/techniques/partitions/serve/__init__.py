"""Plans in the server."""
