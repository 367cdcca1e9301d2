"""Load generator: queries of several tenants sent on schedule, whatever the server does (open loop).

`run_load` runs on an asyncio loop of the caller; `run_load_process` gives it a process of its own, as measurements
need.
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
