"""Logs on standard error: lines for people on a terminal, one JSON object a line elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from datetime import UTC, datetime

import msgspec
from typing_extensions import override


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time (ISO 8601, UTC), level, logger, message and, if any, the traceback."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return msgspec.json.encode(entry).decode()


class PlainFormatter(logging.Formatter):
    """Local time, level and message, and the traceback where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")


LEVEL = "COTENANT_LOG_LEVEL"
"""Environment variable with the least level of the log: debug, info, warning or error. Child processes inherit it."""


def log_to_stderr() -> None:
    """Send all logs of this process to standard error, from the level that `LEVEL` names on (default: info)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter() if sys.stderr.isatty() else JsonFormatter())
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, "").upper(), logging.INFO)
    logging.basicConfig(level=level, handlers=[handler], force=True)
