"""The pure core: events in, actions out. No clock, thread, socket or log in here."""
