"""Predicting latencies: what the policies believe about the world."""
