"""What models that start together are believed to take: units share slots, operations and bandwidth of one device."""
