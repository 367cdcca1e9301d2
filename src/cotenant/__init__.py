"""Serve many deep-learning models of many tenants from few devices, each tenant with an enforced latency target."""

__version__ = "0.1.0"
