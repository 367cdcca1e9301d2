"""Cores that do not fall asleep between the steps of a query.

A query goes from thread to thread, and each wakes the next one. A core that sleeps takes time to wake: some 50 us in a
virtual machine, where it has left for the host, and up to 100 us from the deep states of a real one. A privileged
process may tell Linux what it can bear (PM quality of service); when it ends, the kernel takes the wish back.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from cotenant.core.actions import Action
from cotenant.core.events import Event
from cotenant.execute.protocol import Timing

DEVICE = Path("/dev/cpu_dma_latency")
_DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")
_ANY_US = 2_000_000_000
"""What the kernel takes for no wish."""
_SHALLOW_US = 2
"""Allows the shallowest sleep of a real core and no deeper one."""
_NONE_US = 0
"""Has idle cores wait in the kernel without sleeping: a virtual one knows no shallow sleep."""
HOLD_S = 0.1
"""For so long after the last event cores are kept awake: queries come in bursts, and idle cores cost power. Chosen by
hand; see docs/decisions/0022-awake-cores.md."""
_log = logging.getLogger("cotenant.server")


class CpuLatencyQos:
    """Wishes for cores that wake at once while queries come and go, and until nothing has happened for `hold_s`.

    An observer of the driver. `wish` tells the kernel how many microseconds waking up may take; it is called on a
    thread of its own, which looks every `hold_s` while the wish stands, and sleeps otherwise.
    """

    def __init__(self, hold_s: float, wish: Callable[[int], None], latency_us: int) -> None:
        self._hold_s = hold_s
        self._wish = wish
        self._latency_us = latency_us
        self._happened = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cotenant-awake", daemon=True)
        self._thread.start()

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> None:
        """See Observer."""
        if not self._happened.is_set():
            self._happened.set()

    def close(self) -> None:
        """Take the wish back and end the thread."""
        self._closing.set()
        self._happened.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self._happened.wait()
            if self._closing.is_set():
                return
            self._wish(self._latency_us)
            while self._happened.is_set():
                self._happened.clear()
                if self._closing.wait(self._hold_s):
                    break
            self._wish(_ANY_US)
            if self._closing.is_set():
                return


class LatencyRequest:
    """The open device. Raises OSError when it is not there, or not allowed to this user."""

    def __init__(self, device: Path = DEVICE) -> None:
        self._file = os.open(device, os.O_WRONLY)

    def __call__(self, latency_us: int) -> None:
        """Wish for this latency. An error is logged: queries are served all the same."""
        try:
            os.write(self._file, struct.pack("=i", latency_us))
        except OSError as error:
            _log.warning("cores cannot be kept awake: %s", error)


def open_cpu_latency_qos(hold_s: float = HOLD_S, device: Path = DEVICE, driver: Path = _DRIVER) -> CpuLatencyQos | None:
    """The observer where the system allows it; None where it does not."""
    try:
        wish = LatencyRequest(device)
    except OSError as error:
        _log.info("cores may fall asleep between the steps of a query: %s", error)
        return None
    try:
        is_guest = driver.read_text(encoding="ascii").strip() == "haltpoll"
    except OSError:
        is_guest = False
    return CpuLatencyQos(hold_s, wish, _NONE_US if is_guest else _SHALLOW_US)
