"""Factors of latencies that a server learnt, kept in a file for its next start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from cotenant.errors import CotenantError
from cotenant.files import load, save
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyTable
from cotenant.serve.engine.clock import Clock

_log = logging.getLogger("cotenant.server")
_FORMAT = "cotenant-latency-factors/1"
_SAVE_AFTER_NS = 10_000_000_000
_LOG_PRIORITY = 9
_MOST = 1024
"""Tenants that are kept, the last ones: clients choose how often models change."""


class _Learnt(msgspec.Struct, frozen=True):
    """`factor`: observed over profiled latency, or that of each shape. `table`: digest of the profile."""

    table: str
    factor: float | dict[int, float]


class _File(msgspec.Struct):
    format: str
    tenants: dict[str, _Learnt]


class LearntFactors:
    """Stores the factors of an OnlineModel 10 s after a change, and at the end.

    A factor holds for the profile that it corrects. A file that cannot be read or written is said in the log.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._known: dict[str, _Learnt] = {}
        self._saved: dict[str, _Learnt] = {}
        self._predictor: TablePredictor | None = None
        self._is_due = False
        if path.exists():
            try:
                self._known = load(path, _File, _FORMAT, CotenantError, "it is written again").tenants
            except CotenantError as error:
                _log.warning("%s", error)
        self._saved = dict(self._known)

    def of(self, tenant: str, table: LatencyTable) -> float | Mapping[int, float]:
        """The factor that was learnt for a tenant with this profile; 1 without one."""
        known = self._known.get(tenant)
        return known.factor if known is not None and known.table == _digest(table) else 1.0

    def note(self, predictor: TablePredictor) -> None:
        """Note a new predictor. The file is written on the clock's thread."""
        self._predictor = predictor
        if not self._is_due:
            self._is_due = True
            self._clock.call_at(self._clock.now_ns() + _SAVE_AFTER_NS, _LOG_PRIORITY, self.save)

    def save(self) -> None:
        """Write the present factors, if they differ from those in the file."""
        self._is_due = False
        predictor = self._predictor
        if predictor is None:
            return
        for tenant, scale in predictor.scales.items():
            if tenant not in predictor.tables:
                continue
            factor = dict(scale) if isinstance(scale, Mapping) else scale
            self._known.pop(tenant, None)
            self._known[tenant] = _Learnt(_digest(predictor.tables[tenant]), factor)
        kept = dict(list(self._known.items())[-_MOST:])
        if kept == self._saved:
            return
        self._known, self._saved = kept, dict(kept)
        try:
            save(self._path, _File(_FORMAT, kept))
        except OSError as error:
            _log.warning("learnt factors of latencies are not kept for the next start: %s", error)


def _digest(table: LatencyTable) -> str:
    return sha256(msgspec.json.encode(table.rows)).hexdigest()
