"""Joint schedules in the server."""
