"""A recorded run as a workload: the arrivals of a trace, to be simulated under other policies and settings."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cotenant.errors import ConfigError
from cotenant.trace.trace_log import OnRead, Record, TraceError, read
from cotenant.types import UNSET_RANK
from cotenant.workload import TenantLoad, Trace, Workload

_Kind = tuple[str, int, int, int, int | None]
"""Tenant, rows, shape, priority of the request (0: unset), and time-out in ns."""
_TAIL_NS = 1_000_000_000
_log = logging.getLogger("cotenant.simulate")


def is_trace(path: Path) -> bool:
    """Whether a file begins as a trace does: with an object of JSON."""
    try:
        if not path.is_file():  # reading a pipe waits, and takes what it reads
            return False
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def recorded_workload(
    path: Path, model_of: Callable[[str], str], on_read: OnRead = lambda done, total: None
) -> Workload:
    """The arrivals of a trace: a load for each tenant, and for each other number of rows, shape, priority or time-out.

    `model_of` gives the model or application of a tenant. Times count from the first arrival. Requests that were
    refused before they became queries arrive as queries of their tenant's usual kind. Cancelled queries arrive, and are
    not cancelled. Time-outs have two digits. Queries of applications have neither rows, shapes, priorities nor
    time-outs in a trace. A trace with a gap makes a smaller workload, with a warning in the log.

    Raises TraceError for a file that is no trace, and for a trace without arrivals.
    """
    return _workload(read(path, on_read)[1], path, model_of)


def _workload(records: Iterable[Record], path: Path, model_of: Callable[[str], str]) -> Workload:
    arrived: dict[_Kind, list[int]] = {}
    refused: dict[str, list[int]] = {}
    is_cut = False
    for record in records:
        event = record.event
        is_cut |= record.kind in ("EventsMissing", "LogFull")
        if record.kind == "QueryArrived" and event["query"].get("part_of") is None:
            query = event["query"]
            at_ns, expiry_ns = query["arrival_ns"], query.get("expiry_ns")
            rank = query.get("rank", UNSET_RANK)
            kind = (
                *(query["tenant"], query.get("items", 1), query.get("shape", 0), rank if rank != UNSET_RANK else 0),
                None if expiry_ns is None else round(float(f"{max(1, expiry_ns - at_ns):.2g}")),
            )
            arrived.setdefault(kind, []).append(at_ns)
        elif record.kind == "ApplicationArrived":
            arrived.setdefault((event["application"], 1, 0, 0, None), []).append(event["arrival_ns"])
        elif record.kind == "QueryRefused":
            refused.setdefault(event["tenant"], []).append(event["arrival_ns"])
    if is_cut:
        _log.warning("%s: events are missing, so the workload has fewer queries than the run had", path)
    usual = _usual(arrived)
    for tenant, times in refused.items():
        arrived.setdefault(usual.get(tenant, (tenant, 1, 0, 0, None)), []).extend(times)
    if not arrived:
        raise TraceError(f"{path}: has no arrivals, expected the trace of a run with queries")
    first_ns = min(min(times) for times in arrived.values())
    last_ns = max(max(times) for times in arrived.values())
    usual = _usual(arrived)
    loads = [
        TenantLoad(
            kind[0] if kind == usual[kind[0]] else _name(kind),
            model_of(kind[0]),
            Trace(tuple(sorted(at_ns - first_ns for at_ns in times)), file=str(path)),
            *("http", None, kind[1], kind[2], kind[4], kind[3]),
        )
        for kind, times in sorted(arrived.items(), key=lambda each: (each[0][0], -len(each[1])))
    ]
    return Workload(tuple(loads), last_ns - first_ns + _TAIL_NS)


def _usual(arrived: Mapping[_Kind, list[int]]) -> dict[str, _Kind]:
    """The most frequent kind of each tenant."""
    counts = Counter({kind: len(times) for kind, times in arrived.items()})
    found: dict[str, _Kind] = {}
    for kind, _ in counts.most_common():
        found.setdefault(kind[0], kind)
    return found


def _name(kind: _Kind) -> str:
    """Name of the load of an unusual kind."""
    tenant, rows, shape, priority, timeout_ns = kind
    parts = [f"{rows} rows" if rows != 1 else "", f"shape {shape}" if shape else ""]
    parts += [f"priority {priority}" if priority else "", "" if timeout_ns is None else f"{timeout_ns / 1e6:g} ms"]
    return f"{tenant} ({', '.join(filter(None, parts)) or '1 row'})"


def models_by_tenant(known: Mapping[str, str]) -> Callable[[str], str]:
    """A `model_of` that knows these models. It raises ConfigError for another tenant."""

    def model_of(tenant: str) -> str:
        if tenant not in known:
            raise ConfigError(f"the trace has queries of tenant {tenant!r}, expected one of {', '.join(sorted(known))}")
        return known[tenant]

    return model_of
