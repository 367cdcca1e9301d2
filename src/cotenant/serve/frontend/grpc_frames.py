"""Framing of gRPC over HTTP/2: length-prefixed messages, time-outs, status trailers."""

from __future__ import annotations

from urllib.parse import quote

OK, CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 1, 4, 8, 12, 13
CODES = {
    "OK": OK,
    "CANCELLED": CANCELLED,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": DEADLINE_EXCEEDED,
    "NOT_FOUND": 5,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": RESOURCE_EXHAUSTED,
    "UNIMPLEMENTED": UNIMPLEMENTED,
    "INTERNAL": INTERNAL,
    "UNAVAILABLE": 14,
}
"""Status code by name, for the statuses in use."""
PREFIX_BYTES = 5
START_BYTES = 1 << 10
"""Prefix of a message in bytes that is searched for the name of its model."""
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_PLAIN = "".join(chr(each) for each in range(0x20, 0x7F) if chr(each) != "%")


class FrameError(Exception):
    """Invalid or too large message. `code`: status of the call."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class MessageReader:
    """Incremental reader of the messages of one call."""

    __slots__ = ("_body", "_filled", "_is_packed", "_most_bytes", "_prefix")

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._prefix = b""
        self._body: bytearray | None = None
        self._filled = 0
        self._is_packed = False

    @property
    def is_between(self) -> bool:
        """Whether no incomplete message is buffered."""
        return self._body is None and not self._prefix

    @property
    def came(self) -> int:
        """Received bytes of the message in progress."""
        return self._filled + len(self._prefix)

    @property
    def start(self) -> tuple[bool, bytes]:
        """Whether the message in progress is compressed, and its received first bytes."""
        body = self._body
        return self._is_packed, b"" if body is None else bytes(body[: min(self._filled, START_BYTES)])

    @property
    def length(self) -> int:
        """Length in bytes of the message in progress; 0 if unknown."""
        return 0 if self._body is None else len(self._body)

    def feed(self, data: bytes) -> list[tuple[bool, bytes | bytearray]]:
        """Add data; returns completed messages, each with a flag whether it is compressed. Raises FrameError."""
        if (
            self._body is None
            and not self._prefix
            and len(data) >= PREFIX_BYTES
            and data[0] == 0
            and int.from_bytes(data[1:PREFIX_BYTES], "big") == len(data) - PREFIX_BYTES <= self._most_bytes
        ):
            return [(False, data[PREFIX_BYTES:])]
        found: list[tuple[bool, bytes | bytearray]] = []
        view, at = memoryview(data), 0
        while True:
            body = self._body
            if body is None:
                prefix = self._prefix + data[at : at + PREFIX_BYTES - len(self._prefix)]
                at += len(prefix) - len(self._prefix)
                if len(prefix) < PREFIX_BYTES:
                    self._prefix = prefix
                    return found
                self._prefix = b""
                body = self._body = self._begin(prefix[0], int.from_bytes(prefix[1:], "big"))
            size = min(len(data) - at, len(body) - self._filled)
            body[self._filled : self._filled + size] = view[at : at + size]
            self._filled += size
            at += size
            if self._filled < len(body):
                return found
            found.append((self._is_packed, body))
            self._body, self._filled = None, 0
            if at == len(data):
                return found

    def _begin(self, flag: int, length: int) -> bytearray:
        if flag > 1:
            raise FrameError(INTERNAL, f"the compression flag of a message is {flag}, expected 0 or 1")
        if length > self._most_bytes:
            text = f"a message has {length} bytes, expected at most {self._most_bytes}"
            raise FrameError(RESOURCE_EXHAUSTED, text)
        self._is_packed = flag == 1
        return bytearray(length)


def prefix_of(data: bytes) -> bytes:
    """Length prefix of an uncompressed message."""
    return b"\0" + len(data).to_bytes(4, "big")


def read_timeout_s(text: bytes) -> float | None:
    """Parse `grpc-timeout` in seconds; None for an invalid value."""
    unit = _UNITS_S.get(text[-1:])
    digits = text[:-1]
    return int(digits) * unit if unit is not None and digits.isdigit() and len(digits) <= 8 else None


def status_fields(code: int, message: str) -> list[tuple[bytes, bytes]]:
    """Trailers with a status and its message."""
    return [(b"grpc-status", b"%d" % code), (b"grpc-message", quote(message, safe=_PLAIN).encode())]
