"""CPU latency requests (Linux PM quality of service): cores stay out of deep idle states while queries run.

A query passes from thread to thread, and each thread wakes the next. Waking an idle core takes about 50 us in a
virtual machine, and up to 100 us from the deep states of a physical core. A privileged process may limit this latency;
the kernel drops the request when the process ends.
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
from cotenant.linux import ROOT, is_virtual

DEVICE = Path("/dev/cpu_dma_latency")
_ANY_US = 2_000_000_000
"""Value that the kernel reads as no request. us."""
_SHALLOW_US = 2
"""Allows only the shallowest idle state of a physical core. us."""
_NONE_US = 0
"""Makes idle cores poll in the kernel: a virtual core has no shallow idle state. us."""
HOLD_S = 0.1
"""Seconds after the last event for which the request is held, chosen by decision 0022."""
_log = logging.getLogger("cotenant.server")


class CpuLatencyQos:
    """Holder of a CPU latency request from the first event until no event has come for `hold_s` seconds.

    An observer of the driver. `request` passes a wake-up latency in microseconds to the kernel. A separate thread calls
    it, checks every `hold_s` seconds while the request is held, and sleeps otherwise.
    """

    def __init__(self, hold_s: float, request: Callable[[int], None], latency_us: int) -> None:
        self._hold_s = hold_s
        self._request = request
        self._latency_us = latency_us
        self._happened = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cotenant-cpu-qos", daemon=True)
        self._thread.start()

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> None:
        """Observe an event, as `driver.Observer`."""
        if not self._happened.is_set():
            self._happened.set()

    def close(self) -> None:
        """Drop the request and end the thread."""
        self._closing.set()
        self._happened.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self._happened.wait()
            if self._closing.is_set():
                return
            self._request(self._latency_us)
            while self._happened.is_set():
                self._happened.clear()
                if self._closing.wait(self._hold_s):
                    break
            self._request(_ANY_US)
            if self._closing.is_set():
                return


class LatencyRequest:
    """Open CPU latency device. Raises OSError if it is absent or this user may not open it."""

    def __init__(self, device: Path = DEVICE) -> None:
        self._file = os.open(device, os.O_WRONLY)

    def __call__(self, latency_us: int) -> None:
        """Request this latency. An error is logged and does not affect queries."""
        try:
            os.write(self._file, struct.pack("=i", latency_us))
        except OSError as error:
            _log.warning("the CPU latency request failed (%s): waking idle cores adds latency", error)


def open_cpu_latency_qos(hold_s: float = HOLD_S, device: Path = DEVICE, root: Path = ROOT) -> CpuLatencyQos | None:
    """Create the observer if the system permits CPU latency requests; else None."""
    try:
        request = LatencyRequest(device)
    except OSError as error:
        _log.info("no CPU latency request (%s): waking idle cores adds latency", error)
        return None
    return CpuLatencyQos(hold_s, request, _NONE_US if is_virtual(root) else _SHALLOW_US)
