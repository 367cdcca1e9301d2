"""Limits on connections and malformed requests by address, and arrival times of received bytes."""

from __future__ import annotations

import socket
import struct
import time
from collections import Counter
from typing import Generic, TypeVar

from cotenant.wire.codec import Limits

C = TypeVar("C")
_WINDOW_S = 10.0
"""Seconds for which malformed requests are counted."""
_LEAST_DELAY_S, _MOST_DELAY_S = 0.05, 1.0
"""Delay in seconds per malformed request above the limit, and the maximum delay."""
_SILENT_MS_AT = 52
"""Offset of `tcpi_last_data_recv` in Linux's `tcp_info`: milliseconds since the last data arrived."""


class OpenConnections(Generic[C]):
    """Open connections of a server, counted in total and by address."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.all: set[C] = set()
        self.is_retiring = False
        """Each connection ends after its next answer: another process serves new connections."""
        self._by_address: Counter[str] = Counter()
        self._malformed: Counter[str] = Counter()
        """Malformed requests by address in the current window."""
        self._window_s = 0.0

    def open(self, connection: C, address: str) -> str:
        """Count a connection. Returns the reason if it exceeds a limit, else ""."""
        self.all.add(connection)
        self._by_address[address] += 1
        limits = self.limits
        if len(self.all) > limits.max_connections:
            return f"the server has {limits.max_connections} connections, the limit; try again later"
        if self._by_address[address] > limits.max_connections_per_address:
            return (
                f"{address} has {limits.max_connections_per_address} connections, the limit for one address; close some"
            )
        return ""

    def malformed_delay_s(self, address: str, now_s: float) -> float:
        """Count a malformed request of an address. Returns the seconds by which to delay its answer."""
        if now_s - self._window_s > _WINDOW_S:
            self._window_s = now_s
            self._malformed.clear()
        self._malformed[address] += 1
        beyond = self._malformed[address] - self.limits.max_malformed
        return min(_MOST_DELAY_S, beyond * _LEAST_DELAY_S) if beyond > 0 else 0.0

    def has_too_many_malformed(self, malformed: int) -> bool:
        """Whether to close a connection that has sent `malformed` malformed requests."""
        return malformed > self.limits.max_malformed

    def close(self, connection: C, address: str) -> None:
        """Remove a closed connection."""
        self.all.discard(connection)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def readable_since(descriptor: int) -> int:
    """Monotonic time in ns when the bytes just read from a TCP connection became readable. The kernel records it for
    the last segment, to a tick (1 to 4 ms). If it is not available: now."""
    now = time.monotonic_ns()
    silent_ms = 0
    try:  # uvloop's socket object takes three times as long for this call
        probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            info = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SILENT_MS_AT + 4)
            [silent_ms] = struct.unpack_from("I", info, _SILENT_MS_AT)
        finally:
            probe.detach()  # the transport still owns the descriptor
    except (AttributeError, OSError, ValueError, struct.error):  # not Linux, not TCP, or the connection is closed
        pass
    return now - silent_ms * 1_000_000
