"""Cores are kept awake while queries come, and let go afterwards."""

from __future__ import annotations

import logging
import struct
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from cotenant.core.events import TimerFired
from cotenant.serve.engine.cpu_latency_qos import LatencyRequest, open_cpu_latency_qos

WAIT_S = 30.0
ANY_US = 2_000_000_000


class Wishes:
    """A kernel that says what it was told."""

    def __init__(self) -> None:
        self.told: SimpleQueue[int] = SimpleQueue()

    def __call__(self, latency_us: int) -> None:
        self.told.put(latency_us)

    def next(self) -> int:
        return self.told.get(timeout=WAIT_S)


def made(hold_s: float, wishes: Wishes, monkeypatch: pytest.MonkeyPatch, folder: Path, driver: str | None) -> object:
    monkeypatch.setattr("cotenant.serve.engine.cpu_latency_qos.LatencyRequest", lambda _: wishes)
    if driver is not None:
        (idle := folder / "sys/devices/system/cpu/cpuidle").mkdir(parents=True)
        (idle / "current_driver").write_text(driver + "\n")
    awake = open_cpu_latency_qos(hold_s, folder / "device", folder)
    assert awake is not None
    return awake


@pytest.mark.parametrize(("driver", "wished_us"), [("haltpoll", 0), ("intel_idle", 2), (None, 2)])
def test_the_wish_stands_until_nothing_has_happened_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str | None, wished_us: int
) -> None:
    wishes = Wishes()
    awake = made(0.001, wishes, monkeypatch, tmp_path, driver)
    for _ in range(3):
        assert awake(0, TimerFired(), [], None) is None  # type: ignore[operator]
        assert [wishes.next(), wishes.next()] == [wished_us, ANY_US]
    awake.close()  # type: ignore[attr-defined]
    assert wishes.told.empty()


def test_closing_takes_the_wish_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = Wishes()
    awake = made(3600.0, wishes, monkeypatch, tmp_path, "haltpoll")
    for _ in range(100):
        awake(0, TimerFired(), [], None)  # type: ignore[operator]
    assert wishes.next() == 0
    awake.close()  # type: ignore[attr-defined]
    assert wishes.next() == ANY_US
    assert wishes.told.empty()
    assert not [thread for thread in threading.enumerate() if thread.name == "cotenant-cpu-qos"]


def test_what_the_kernel_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = tmp_path / "device"
    device.touch()
    wish = LatencyRequest(device)
    wish(0)
    wish(ANY_US)
    assert device.read_bytes() == struct.pack("=ii", 0, ANY_US)
    full = LatencyRequest(Path("/dev/full"))
    full(0)
    assert "the CPU latency request failed" in caplog.text


def test_where_it_is_not_allowed_nothing_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cotenant.server"):
        assert open_cpu_latency_qos(0.1, tmp_path / "missing") is None
    assert "no CPU latency request" in caplog.text
