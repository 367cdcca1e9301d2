"""Serve many deep-learning models of many tenants from few devices, each tenant with an enforced latency target."""

import os

# As soon as it is imported, onnxruntime keeps a device id and records of use below HOME; it looks here first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
