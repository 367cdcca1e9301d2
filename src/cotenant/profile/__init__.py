"""Profiles: measured latencies of models over batch, shape and cores, and the sweeps that measure them."""
