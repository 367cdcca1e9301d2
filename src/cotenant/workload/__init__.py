"""Workloads: which tenant gets how many queries, spaced how. One file drives the load generator and the simulator."""

from cotenant.workload.arrivals import Arrival, ArrivalBlock, arrival_blocks, arrivals
from cotenant.workload.parse import load_workload, parse_workload, to_toml
from cotenant.workload.spec import (
    ArrivalProcess,
    Gamma,
    Mmpp,
    Poisson,
    TenantLoad,
    Trace,
    Uniform,
    Workload,
    for_capacity,
    scale,
    with_rates,
)

__all__ = [
    "Arrival",
    "ArrivalBlock",
    "ArrivalProcess",
    "Gamma",
    "Mmpp",
    "Poisson",
    "TenantLoad",
    "Trace",
    "Uniform",
    "Workload",
    "arrival_blocks",
    "arrivals",
    "for_capacity",
    "load_workload",
    "parse_workload",
    "scale",
    "to_toml",
    "with_rates",
]
