"""Heads of HTTP/1.1 requests: llhttp parses them, and a bounded memory of exact bytes spares most of that.

Clients send the same head again and again; what it means is then looked up.
"""

from __future__ import annotations

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct

Headers = tuple[tuple[bytes, bytes], ...]

TENSORS_AT = b"inference-header-content-length"
"""The header that says how long the JSON before binary tensors is."""
CHUNKED = -1
"""Length of a body that comes in chunks."""
_KNOWN_HEADS = 1024
_KNOWN_HEAD_BYTES = 2 << 10


class BadRequestError(Exception):
    """The bytes are no request that is answered, or beyond a limit; `status` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Head(Struct, frozen=True, gc=False):
    """The head of a request. Names of headers are in lower case; `path` is raw, without a query.

    `length` is that of the body in bytes, or CHUNKED. `keeps`: whether the connection stays open after the answer.
    `expects`: whether the client waits for "100 Continue" before it sends the body. `is_old`: it speaks HTTP/1.0.
    Binary tensors begin at `tensors_at` of the body, as far as the head says so.
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
    """What llhttp calls back with."""

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
        self.is_complete, self.keeps = True, self.parser.should_keep_alive()  # which llhttp forgets behind the head


class HeadParser:
    """Parses heads, and knows those that it saw before. For one event loop, not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}

    def parse(self, data: bytes) -> Head:
        """The head that these bytes are, up to and with the blank line that ends it. Raises BadRequestError."""
        head = self._known.get(data)
        if head is None:
            head = parse_head(data)
            if len(data) <= _KNOWN_HEAD_BYTES:
                if len(self._known) >= _KNOWN_HEADS:
                    self._known.clear()
                self._known[data] = head
        return head


def parse_head(data: bytes) -> Head:
    """Do the work of HeadParser.parse without its memory."""
    fields = _Fields()
    parser = fields.parser
    try:
        parser.feed_data(data)
    except HttpParserUpgrade:
        pass  # HTTP allows to ignore the wish for another protocol
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
            length = int(value)  # llhttp takes digits alone, and no second one beside chunks
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
    """The path of a request's target, which may be that of a proxy (RFC 9112, section 3.2.2)."""
    path = url.partition(b"#")[0].partition(b"?")[0]
    if path.startswith(b"/"):
        return path
    scheme, _, rest = path.partition(b"://")
    if scheme.lower() not in (b"http", b"https") or not rest or rest.startswith(b"["):
        raise BadRequestError(400, "the target of the request is no path, expected one that begins with '/'")
    slash = rest.find(b"/")
    return rest[slash:] if slash >= 0 else b"/"


def _no_http() -> BadRequestError:
    return BadRequestError(400, "the bytes received are no valid HTTP/1.1 request")
