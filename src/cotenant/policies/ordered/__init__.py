"""List-scheduling policies: by arrival, by length, by deadline."""
