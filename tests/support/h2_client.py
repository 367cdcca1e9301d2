"""A client of HTTP/2 that sends given frames, for calls of gRPC on one connection."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ngh2 import (
    Configuration,
    Connection,
    DataReceived,
    GoAwayReceived,
    NGH2Error,
    ResponseReceived,
    Role,
    Setting,
    StreamClosed,
    TrailersReceived,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INFER = "/inference.GRPCInferenceService/ModelInfer"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """The bytes of one frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def message(data: bytes, flag: int = 0) -> bytes:
    """A message of gRPC behind its length."""
    return bytes([flag]) + len(data).to_bytes(4, "big") + data


class H2Client:
    """One connection. Incoming frames are kept by stream: header fields of the answer and its trailers, and data."""

    def __init__(self, port: int, window: int = 65_535, *, acknowledges: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.h2 = Connection(Role.CLIENT, Configuration(auto_window_update=acknowledges))
        self.h2.initiate_connection({Setting.INITIAL_WINDOW_SIZE: window})
        self.fields: dict[int, dict[bytes, bytes]] = defaultdict(dict)
        self.data: dict[int, bytes] = defaultdict(bytes)
        self.unacknowledged: dict[int, int] = defaultdict(int)
        self.closed: dict[int, int] = {}
        self.goaway: Any = None
        self.is_ended = False

    def __enter__(self) -> H2Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, path: str = INFER, data: bytes | None = None, *, ends: bool = True, **fields: str) -> int:
        """Begin a call, with bytes of its request if there are any; the number of its stream."""
        headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x")]
        headers += [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
        headers += [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
        stream = self.h2.send_request(headers)
        if data is not None:
            self.h2.send_data(stream, data, end_stream=ends)
        return stream

    def flush(self) -> None:
        data = self.h2.data_to_send()
        if data:
            self.socket.sendall(data)

    def pump(self, until: Callable[[], bool], limit_s: float = 20.0) -> bool:
        """Send and receive until something is so; False after `limit_s`, or when the server has closed."""
        end_s = time.monotonic() + limit_s
        while not until():
            self.flush()
            self.socket.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                data = self.socket.recv(1 << 20)
            except TimeoutError:
                return False
            except ConnectionError:
                data = b""
            if not data:
                self.is_ended = True
                return until()
            try:
                self.h2.receive_data(data)
            except NGH2Error:
                self.is_ended = True
                return until()
            self._keep()
        self.flush()
        return True

    def _keep(self) -> None:
        for event in self.h2.events():
            match event:
                case ResponseReceived() | TrailersReceived():
                    self.fields[event.stream_id] |= dict(event.headers)
                case DataReceived():
                    self.data[event.stream_id] += event.data
                    self.unacknowledged[event.stream_id] += len(event.data)
                case StreamClosed():
                    self.closed[event.stream_id] = event.error_code
                case GoAwayReceived():
                    self.goaway = event

    def wait(self, *streams: int, limit_s: float = 20.0) -> bool:
        """Wait until these streams are closed."""
        return self.pump(lambda: all(each in self.closed for each in streams), limit_s)

    def status(self, stream: int) -> int:
        """The status of a call that is over; -1 where none came."""
        return int(self.fields[stream].get(b"grpc-status", b"-1"))

    def is_closed_by_server(self, limit_s: float = 20.0) -> bool:
        self.pump(lambda: False, limit_s)
        return self.is_ended
