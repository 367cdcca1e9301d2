"""The kinds of simulated worlds that commands and the Python API know by name."""

from __future__ import annotations

from enum import StrEnum


class WorldKind(StrEnum):
    """How long launches take in the simulator."""

    TABLE = "table"
    CONTENTION = "contention"
    GROUPS = "groups"
