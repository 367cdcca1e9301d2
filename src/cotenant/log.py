"""Structured logs on standard error, one JSON object per line."""

from __future__ import annotations

import logging
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


def log_to_stderr(level: int = logging.INFO) -> None:
    """Write all logs of this process to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
