"""Incremental decoder of the chunked transfer coding of HTTP/1.1 (RFC 9112, section 7.1)."""

from __future__ import annotations

import re

from cotenant.serve.frontend.http_head import BadRequestError

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*"'
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})(?:;%b(?:=(?:%b|%b))?)*\r\n" % (_TOKEN, _TOKEN, _QUOTED))
_TRAILER = re.compile(rb"%b:[\t -~\x80-\xff]*\r\n" % _TOKEN)
_FRAME_BYTES = 20
"""Allowance for the framing of a chunk: its size and two line ends. Further bytes count as header bytes."""


class ChunkedBody:
    """Decoder of a chunked body. Extensions and trailers are ignored, up to a limit in bytes.

    `body`: decoded bytes so far. `is_complete`: the body has ended.
    """

    def __init__(self, max_body_bytes: int, max_extra_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_extra_bytes = max_extra_bytes
        self.body = bytearray()
        self.is_complete = False
        self._left = 0
        """Bytes missing of the current chunk and its line end."""
        self._extra = 0
        self._in_trailers = False

    def feed(self, data: bytes | bytearray, at: int) -> int:
        """Decode bytes from position `at`; returns the position after the last consumed byte. Raises BadRequestError.

        The rest is an incomplete line, to be passed again with more data, or belongs to the next request.
        """
        while not self.is_complete and at < len(data):
            if self._left > 2:
                taken = min(self._left - 2, len(data) - at)
                self.body += memoryview(data)[at : at + taken]
                at, self._left = at + taken, self._left - taken
                continue
            if self._left:
                if len(data) - at < 2:
                    return at
                if data[at : at + 2] != b"\r\n":
                    raise _malformed("a chunk is not followed by an end of line")
                at, self._left = at + 2, 0
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._check_extra(self._extra + len(data) - at)
                return at
            end += 1
            line = bytes(data[at:end])
            self._take_line(line)
            at = end
        return at

    def _take_line(self, line: bytes) -> None:
        if self._in_trailers:
            self._count(len(line))
            if line == b"\r\n":
                self.is_complete = True
            elif not _TRAILER.fullmatch(line):
                raise _malformed("a trailer is not a header field")
            return
        self._count(len(line) - _FRAME_BYTES)
        found = _SIZE.fullmatch(line)
        if found is None:
            raise _malformed("the size of a chunk is not a hexadecimal number")
        size = int(found[1], 16)
        if len(self.body) + size > self._max_body_bytes:
            raise BadRequestError(413, f"the body has more than {self._max_body_bytes} bytes, the limit")
        if size:
            self._left = size + 2
        else:
            self._in_trailers = True

    def _count(self, extra: int) -> None:
        self._extra = max(0, self._extra + extra)
        self._check_extra(self._extra)

    def _check_extra(self, extra: int) -> None:
        if extra > self._max_extra_bytes:
            text = f"chunk extensions and trailers have more than {self._max_extra_bytes} bytes, the limit"
            raise BadRequestError(431, text)


def _malformed(why: str) -> BadRequestError:
    return BadRequestError(400, f"the chunked body is malformed: {why}")
