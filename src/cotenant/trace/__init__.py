"""The append-only log of events and the actions that they caused: write, read, replay, explain."""

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
    read,
    replay,
    same_decisions,
    work_of,
)

__all__ = [
    "FORMAT",
    "Header",
    "Record",
    "TraceError",
    "TraceWriter",
    "basis_of",
    "decode_event",
    "encode",
    "header",
    "headroom_ns",
    "in_lines",
    "read",
    "replay",
    "same_decisions",
    "work_of",
]
