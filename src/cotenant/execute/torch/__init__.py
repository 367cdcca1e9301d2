"""torch.export archives: reading, checking and cutting them, and the executor on streams of a device."""
