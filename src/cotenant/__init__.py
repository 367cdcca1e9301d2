"""Serve many deep-learning models of many tenants from few devices, each tenant with an enforced latency target."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cotenant.api.assumed import AssumedModel, engine
    from cotenant.api.embedded_server import EmbeddedServer as Server
    from cotenant.api.explaining import explain
    from cotenant.api.planning import check_plan, plan
    from cotenant.api.profiling import profile
    from cotenant.api.repository import ModelRepository as Repository
    from cotenant.api.simulation import simulate
    from cotenant.api.sweeping import sweep
    from cotenant.core.events import LaunchEnded, QueryArrived
    from cotenant.core.snapshot import Policy
    from cotenant.errors import CotenantError
    from cotenant.types import Query
    from cotenant.wire.client import InferenceClient as Client

# As soon as it is imported, onnxruntime keeps a device id and records of use below HOME; it looks here first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
__all__ = [
    "AssumedModel",
    "Client",
    "CotenantError",
    "LaunchEnded",
    "Policy",
    "Query",
    "QueryArrived",
    "Repository",
    "Server",
    "check_plan",
    "engine",
    "explain",
    "plan",
    "profile",
    "simulate",
    "sweep",
]

_PLACES = {
    "AssumedModel": "api.assumed:AssumedModel",
    "Client": "wire.client:InferenceClient",
    "CotenantError": "errors:CotenantError",
    "LaunchEnded": "core.events:LaunchEnded",
    "Policy": "core.snapshot:Policy",
    "Query": "types:Query",
    "QueryArrived": "core.events:QueryArrived",
    "Repository": "api.repository:ModelRepository",
    "Server": "api.embedded_server:EmbeddedServer",
    "check_plan": "api.planning:check_plan",
    "engine": "api.assumed:engine",
    "explain": "api.explaining:explain",
    "plan": "api.planning:plan",
    "profile": "api.profiling:profile",
    "simulate": "api.simulation:simulate",
    "sweep": "api.sweeping:sweep",
}
"""Module and attribute of each name of the API."""


def __getattr__(name: str) -> Any:
    """Import a name of the API at its first use: `import cotenant` alone loads no other module."""
    from importlib import import_module

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    found = globals()[name] = getattr(import_module(f"cotenant.{module}"), attribute)
    return found


def __dir__() -> list[str]:
    """The names of the API, and the modules that are loaded."""
    return sorted({*globals(), *__all__})
