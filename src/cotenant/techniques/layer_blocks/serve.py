"""Measures the memory pressure while a server serves, and reports the part of other processes to the predictor.

The source is cache counters, if they are readable and calibrated, else a canary: a timed memory copy of 0.25 ms, four
times a second. The predicted bandwidth of running launches is subtracted: policies know it themselves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from cotenant.core.engine import Engine
from cotenant.core.events import PredictorChanged
from cotenant.errors import CotenantError
from cotenant.measure.antagonist import Canary
from cotenant.measure.cache_counters import CacheCounters
from cotenant.measure.contention_profile import PressureScales, load_contention
from cotenant.predict.online import OnlineModel
from cotenant.profiles.device import this_device
from cotenant.repository import contention_path
from cotenant.serve.engine.driver import Driver
from cotenant.serve.services import Host, Service

PERIOD_S = 0.25
_WEIGHT = 0.3
"""Weight of a reading in the exponential moving average."""
_log = logging.getLogger("cotenant.server")

Read = Callable[[], float]
"""Reads the present pressure of all processes, from 0 to 1."""


class PressureMonitor:
    """A thread that reads the pressure every `period_s`, from `start` to `close`."""

    def __init__(self, driver: Driver, beliefs: OnlineModel, read: Read, period_s: float = PERIOD_S) -> None:
        self._driver, self._beliefs, self._read, self._period_s = driver, beliefs, read, period_s
        self._outside = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="cotenant-pressure", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        self._thread.join()

    def step(self) -> None:
        """Read once, and report the result to the engine."""
        pressure = self._read()

        def look(engine: Engine) -> list[PredictorChanged]:
            outside = max(0.0, pressure - self._own(engine))
            self._outside += _WEIGHT * (outside - self._outside)
            changed = self._beliefs.pressed(round(self._outside, 3))
            return [] if changed is None else [changed]

        self._driver.post_from(look)

    def _follow(self) -> None:
        while not self._stopping.wait(self._period_s):
            try:
                self.step()
            except Exception:
                _log.exception("the memory pressure is no longer measured")
                return

    def _own(self, engine: Engine) -> float:
        """The share of the memory bandwidth that running launches are predicted to use."""
        predictor = self._beliefs.predictor
        drawn = 0.0
        for run in engine.snapshot(0).running.values():
            work, cores = run.launch.work, run.launch.share.size
            spans = predictor.spans(work.tenant, work.shape, work.items)
            if spans.moved[-1] and work.end <= spans.units:
                cores, version = min(cores, spans.cores), min(work.version, spans.versions - 1)
                drawn += spans.block_bytes(work.start, work.end, version, cores) / max(1, run.launch.predicted_ns)
        bandwidth = predictor.bandwidth_bytes_per_s
        return min(1.0, drawn * 1e9 / bandwidth) if bandwidth else 0.0


def monitor_of(root: Path, driver: Driver, beliefs: OnlineModel, cores: tuple[int, ...]) -> PressureMonitor | None:
    """A monitor if models have versions for pressure and `cotenant profile --contention` was run on this device, else
    None."""
    if not beliefs.predictor.bandwidth_bytes_per_s or not contention_path(root).exists():
        return None
    try:
        found = load_contention(contention_path(root))
    except CotenantError as error:
        _log.warning("the memory pressure is not measured: %s", error)
        return None
    if found.device.fingerprint != this_device().fingerprint or found.pressure is None:
        return None
    read = reader_of(found.pressure, cores)
    return None if read is None else PressureMonitor(driver, beliefs, read)


class Pressure(Service):
    """Runs a PressureMonitor in a server with models that have versions for pressure."""

    def __init__(self, server: Host) -> None:
        super().__init__(server)
        self._monitor: PressureMonitor | None = None

    def ready(self) -> None:
        """Start the monitor if there is a source to read."""
        server = self.server
        cores = tuple(core for device in server.machine.devices for core in device.cores)
        self._monitor = monitor_of(server.root, server.driver, server.beliefs, cores)
        if self._monitor is not None:
            self._monitor.start()

    @override
    def close(self, until_s: float) -> None:
        if self._monitor is not None:
            self._monitor.close()


def reader_of(
    scales: PressureScales,
    cores: tuple[int, ...],
    open_counters: Callable[[tuple[int, ...]], CacheCounters] = CacheCounters,
) -> Read | None:
    """The source of the pressure: counters, else a canary; None without a calibrated one."""
    if scales.counters is not None:
        model = scales.counters
        try:
            counters = open_counters(cores)
        except CotenantError as error:
            _log.warning("cache counters cannot be read, so a timed copy measures the memory pressure: %s", error)
        else:
            return lambda: model.pressure(counters.read())
    if scales.slowdowns is None:
        return None
    scale, canary = scales.slowdowns, Canary()
    return lambda: scale.pressure(canary.ns() / scales.canary_ns)
