"""Open-loop load generator: sends the queries of several tenants on schedule, independent of the server.

`run_load` runs on the asyncio loop of the caller, `run_load_process` in its own process, for measurements.
"""

from cotenant.load.errors import LoadError
from cotenant.load.generator import run_load
from cotenant.load.load_process import run_load_process
from cotenant.load.result import Lag, LiveStats, LoadResult, TenantInfo, TenantLive

__all__ = [
    "Lag",
    "LiveStats",
    "LoadError",
    "LoadResult",
    "TenantInfo",
    "TenantLive",
    "run_load",
    "run_load_process",
]
