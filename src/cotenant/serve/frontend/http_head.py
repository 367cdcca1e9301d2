"""Heads of HTTP/1.1 requests, parsed by llhttp, with a bounded cache by exact bytes.

Clients repeat the same head in most requests, so the cache avoids most of the parsing.
"""

from __future__ import annotations

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct

Headers = tuple[tuple[bytes, bytes], ...]

TENSORS_AT = b"inference-header-content-length"
"""Header with the length of the JSON before the binary tensors."""
CHUNKED = -1
"""Value of `Head.length` for a chunked body."""
_KNOWN_HEADS = 1024
_KNOWN_HEAD_BYTES = 2 << 10


class BadRequestError(Exception):
    """Invalid request, or a request above a limit. `status`: HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Head(Struct, frozen=True, gc=False):
    """Head of a request. Header names are in lower case; `path` is raw, without a query string.

    `length`: body length in bytes, or CHUNKED. `keeps`: the connection stays open after the answer. `expects`: the
    client waits for "100 Continue" before it sends the body. `is_old`: HTTP/1.0. `tensors_at`: offset of the binary
    tensors in the body, 0 if not declared.
    """

    method: str
    path: bytes
    headers: Headers
    length: int
    keeps: bool
    expects: bool
    is_old: bool
    tensors_at: int = 0


class _Fields:
    """Callbacks of llhttp."""

    def __init__(self) -> None:
        self.parser = HttpRequestParser(self)
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = self.keeps = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_complete, self.keeps = True, self.parser.should_keep_alive()  # llhttp resets it after the head


class HeadParser:
    """Parser of heads with a cache. For one event loop, not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}

    def parse(self, data: bytes) -> Head:
        """Parse a head, including the final blank line. Raises BadRequestError."""
        head = self._known.get(data)
        if head is None:
            head = parse_head(data)
            if len(data) <= _KNOWN_HEAD_BYTES:
                if len(self._known) >= _KNOWN_HEADS:
                    self._known.clear()
                self._known[data] = head
        return head


def parse_head(data: bytes) -> Head:
    """Parse a head without the cache. Raises BadRequestError."""
    fields = _Fields()
    parser = fields.parser
    try:
        parser.feed_data(data)
    except HttpParserUpgrade:
        pass  # HTTP allows a server to ignore an upgrade request
    except HttpParserError:
        raise _no_http() from None
    if not fields.is_complete:
        raise _no_http()
    method = parser.get_method().decode("latin-1")
    if method == "CONNECT":
        raise BadRequestError(405, "method CONNECT is not allowed, expected GET or POST")
    length, expects, tensors_at = 0, False, 0
    for name, value in fields.headers:
        if name == b"content-length":
            length = int(value)  # llhttp accepts only digits, and not together with chunked
        elif name == b"transfer-encoding":
            length = CHUNKED
        elif name == b"expect":
            expects = value.lower() == b"100-continue"
        elif name == TENSORS_AT and value.isdigit():
            tensors_at = int(value[:18])
    is_old = parser.get_http_version() == "1.0"
    path, headers = _path_of(fields.url), tuple(fields.headers)
    return Head(method, path, headers, length, fields.keeps, expects, is_old, tensors_at)


def _path_of(url: bytes) -> bytes:
    """Path of a request target, which may be in absolute form (RFC 9112, section 3.2.2)."""
    path = url.partition(b"#")[0].partition(b"?")[0]
    if path.startswith(b"/"):
        return path
    scheme, _, rest = path.partition(b"://")
    if scheme.lower() not in (b"http", b"https") or not rest or rest.startswith(b"["):
        raise BadRequestError(400, "the request target is not a path, expected one that begins with '/'")
    slash = rest.find(b"/")
    return rest[slash:] if slash >= 0 else b"/"


def _no_http() -> BadRequestError:
    return BadRequestError(400, "the received bytes are not a valid HTTP/1.1 request")
