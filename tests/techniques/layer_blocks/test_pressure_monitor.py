"""The pressure that a server measures: what others than it make of it, from readings that are made up."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.core.events import Event, PredictorChanged
from cotenant.errors import CotenantError
from cotenant.measure.antagonist import Canary
from cotenant.measure.contention_profile import ContentionProfile, PressureScales, save_contention
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.online import OnlineModel
from cotenant.predict.pressure import CacheReading, CounterModel, SlowdownScale
from cotenant.profiles.device import this_device
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.profiles.version_table import Implementation, UnitVersions, VersionTable
from cotenant.repository import contention_path
from cotenant.serve.engine.clock import VirtualClock
from cotenant.serve.engine.driver import Driver
from cotenant.techniques.layer_blocks import serve as pressure_monitor
from cotenant.techniques.layer_blocks.serve import PressureMonitor, monitor_of, reader_of
from cotenant.types import Query, Tenant
from cotenant.work import Machine
from cotenant.world.simulated import SimulatedExecutor, TableWorld
from scenario import CORES, MS, ONE_LANE
from strict_engine import StrictEngine as Engine

# One unit that takes 10 ms and moves 50 MB, a quarter of 20 GB/s.
UNIT = UnitVersions((Implementation((1,), (10 * MS,), (50 * 10**6,)),), (0, 0))
TABLE = LatencyTable((LatencyRow(0, 1, 1, 10 * MS),), (1.0,), 1.0, VersionTable(1, 2, 20 * 10**9, (UNIT,)))
SCALES = PressureScales(1000, SlowdownScale(((1.0, 0.0), (2.0, 1.0))), None, "not here")


class Bench:
    """A driver in virtual time whose beliefs are told the pressure."""

    def __init__(self) -> None:
        self.beliefs = OnlineModel(1)
        self.beliefs.add("a", TABLE)
        self.told: list[float] = []
        clock = VirtualClock()
        engine = Engine((Tenant("a", 500 * MS),), Edf(ONE_LANE), self.beliefs.predictor, Machine.cpu(CORES))
        executor = SimulatedExecutor(TableWorld(self.beliefs.predictor), clock)
        self.driver = Driver(engine, executor, clock, (self._watch,))

    def _watch(self, _: int, event: Event, *__: object) -> None:
        if isinstance(event, PredictorChanged):
            self.told.append(event.predictor.beside)  # type: ignore[attr-defined]

    def steps(self, pressure: float, count: int) -> None:
        monitor = PressureMonitor(self.driver, self.beliefs, lambda: pressure)
        for _ in range(count):
            monitor.step()


def test_readings_are_followed_and_small_changes_left_out() -> None:
    bench = Bench()
    bench.steps(0.8, 20)
    assert bench.told == sorted(bench.told)
    assert len(bench.told) < 8
    assert bench.beliefs.predictor.beside == pytest.approx(0.8, abs=0.1)
    bench.steps(0.0, 1)
    assert bench.beliefs.predictor.beside == 0.0


def test_what_launches_under_way_draw_is_taken_off() -> None:
    bench = Bench()
    x = {"x": np.zeros(1, np.float32)}
    bench.driver.submit(lambda number, now: Query(number, "a", now, now + 500 * MS), x, lambda *_: None)
    assert bench.driver.read(lambda engine: engine.running) == 1
    bench.steps(0.25, 30)
    assert bench.told == []
    bench.steps(0.75, 30)
    assert bench.beliefs.predictor.beside == pytest.approx(0.5, abs=0.1)


def test_it_reads_until_it_is_closed_and_stops_at_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    bench, read = Bench(), threading.Semaphore(0)

    def reading() -> float:
        read.release()
        return 1.0

    monitor = PressureMonitor(bench.driver, bench.beliefs, reading, 0.0)
    monitor.start()
    for _ in range(5):
        assert read.acquire(timeout=10)
    monitor.close()
    assert bench.told

    def broken() -> float:
        raise OSError("gone")

    broken_monitor = PressureMonitor(bench.driver, bench.beliefs, broken, 0.0)
    broken_monitor.start()
    broken_monitor._thread.join(10)
    assert not broken_monitor._thread.is_alive()
    assert "no longer measured" in caplog.text


def test_counters_go_before_the_canary(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Canary, "ns", lambda _: 1500)
    by_canary = reader_of(SCALES, (0,))
    assert by_canary is not None
    assert by_canary() == 0.5
    counted = PressureScales(1000, SCALES.slowdowns, CounterModel(0.1, 0.0, 0.5))

    class Counters:
        def read(self) -> CacheReading:
            return CacheReading(1.0, 0.4)

    by_counters = reader_of(counted, (0,), lambda _: Counters())  # type: ignore[arg-type,return-value]
    assert by_counters is not None
    assert by_counters() == pytest.approx(0.3)

    def refuse(_: object) -> Any:
        raise CotenantError("not allowed")

    after_all = reader_of(counted, (0,), refuse)
    assert after_all is not None
    assert after_all() == 0.5
    assert "so a timed copy measures the memory pressure: not allowed" in caplog.text
    assert reader_of(PressureScales(1000, None, None), (0,)) is None


def test_there_is_a_monitor_where_it_was_calibrated_here_and_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    plain = OnlineModel(1)
    monkeypatch.setattr(pressure_monitor, "Canary", lambda: None)

    def found(beliefs: OnlineModel) -> bool:
        return monitor_of(tmp_path, bench.driver, beliefs, (0,)) is not None

    assert not found(bench.beliefs)
    made = ContentionProfile(this_device(), "", (10**9,), None, {}, SCALES)
    save_contention(contention_path(tmp_path), made)
    assert found(bench.beliefs)
    assert not found(plain), "no model has versions"
    save_contention(contention_path(tmp_path), ContentionProfile(this_device(), "", (10**9,), None, {}))
    assert not found(bench.beliefs)
    contention_path(tmp_path).write_text("{", encoding="utf-8")
    assert not found(bench.beliefs)
    assert "the memory pressure is not measured" in caplog.text
