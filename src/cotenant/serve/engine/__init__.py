"""What decides and what is believed: the driver of the engine, what it observes, and whoever steers it."""
