"""Traces: the append-only log of events and actions, its replay, and the analyses that read it."""

from cotenant.trace.record_check import EventsMissing, OthersTook
from cotenant.trace.trace_log import (
    FORMAT,
    Header,
    Record,
    TraceError,
    TraceWriter,
    basis_of,
    decode_event,
    encode,
    header,
    headroom_ns,
    in_lines,
    missing_events,
    others_share,
    read,
    replay,
    same_decisions,
    work_of,
)

__all__ = [
    "FORMAT",
    "EventsMissing",
    "Header",
    "OthersTook",
    "Record",
    "TraceError",
    "TraceWriter",
    "basis_of",
    "decode_event",
    "encode",
    "header",
    "headroom_ns",
    "in_lines",
    "missing_events",
    "others_share",
    "read",
    "replay",
    "same_decisions",
    "work_of",
]
