"""Profiles: measured latencies of models by batch, shape and cores, and the file that holds them."""
