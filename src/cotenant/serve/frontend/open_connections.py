"""What connections have in common, whatever is spoken on them: their number, and the time when bytes came."""

from __future__ import annotations

import socket
import struct
import time
from collections import Counter
from typing import Generic, TypeVar

from cotenant.wire.codec import Limits

C = TypeVar("C")
_WINDOW_S = 10.0
"""Malformed requests are counted for so long."""
_LEAST_DELAY_S, _MOST_DELAY_S = 0.05, 1.0
"""The delay of the answer to the first one beyond the limit, which grows by as much with each, up to the most."""
_SILENT_MS_AT = 52
"""Where Linux's `tcp_info` has the milliseconds since the last data came (`tcpi_last_data_recv`)."""


class OpenConnections(Generic[C]):
    """The open connections of a server, counted in all and by address."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.all: set[C] = set()
        self._by_address: Counter[str] = Counter()
        self._malformed: Counter[str] = Counter()
        """Malformed requests by address, since the time of the window."""
        self._window_s = 0.0

    def open(self, connection: C, address: str) -> str:
        """Count a connection; a sentence where there are too many."""
        self.all.add(connection)
        self._by_address[address] += 1
        limits = self.limits
        if len(self.all) > limits.max_connections:
            return f"the server has {limits.max_connections} connections, the limit; try again later"
        if self._by_address[address] > limits.max_connections_per_address:
            return f"{address} has {limits.max_connections_per_address} connections, the limit for one address"
        return ""

    def blame(self, address: str, now_s: float) -> float:
        """Count a malformed request of an address. Gives the time, in seconds, by which its answer is to be delayed."""
        if now_s - self._window_s > _WINDOW_S:
            self._window_s = now_s
            self._malformed.clear()
        self._malformed[address] += 1
        beyond = self._malformed[address] - self.limits.max_malformed
        return min(_MOST_DELAY_S, beyond * _LEAST_DELAY_S) if beyond > 0 else 0.0

    def is_hopeless(self, malformed: int) -> bool:
        """Whether a connection that sent so many malformed requests is to be closed."""
        return malformed > self.limits.max_malformed

    def close(self, connection: C, address: str) -> None:
        """A connection that was opened is gone."""
        self.all.discard(connection)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def readable_since(descriptor: int) -> int:
    """The monotonic time, in nanoseconds, since when the bytes just read from a TCP connection could be read.

    The kernel notes it for the last piece that came, to one of its ticks (1 to 4 ms). Where it does not tell: now.
    """
    now = time.monotonic_ns()
    silent_ms = 0
    try:  # uvloop's stand-in for the socket takes three times as long to ask
        asked = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            told = asked.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SILENT_MS_AT + 4)
            [silent_ms] = struct.unpack_from("I", told, _SILENT_MS_AT)
        finally:
            asked.detach()  # the descriptor stays the transport's
    except (AttributeError, OSError, ValueError, struct.error):  # no Linux, no TCP, or the connection is gone
        pass
    return now - silent_ms * 1_000_000
