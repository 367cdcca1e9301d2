"""One end of a link: messages in both directions over a stream socket, gathered so that one write takes many."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

M = TypeVar("M")
_HEAD = struct.Struct("<I")
MOST_FRAME_BYTES = 256 << 20
_MOST_UNREAD_BYTES = 512 << 20
"""An end that lets so much lie unread hangs: the link is cut."""
_log = logging.getLogger("cotenant.link")


class ProcessLink(asyncio.Protocol, Generic[M]):
    """An end on the running loop. `on_messages` is told all that one read brought, `on_lost` once of the end.

    Both are called on the loop, and so are all methods.
    """

    def __init__(self, kinds: Any, on_messages: Callable[[Sequence[M]], None], on_lost: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._decode: Callable[[Any], list[M]] = msgspec.msgpack.Decoder(list[kinds]).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._transport: Any = None
        self._unsent: list[Any] = []
        self._data = b""

    def send(self, message: object) -> None:
        """Send a message, with the others of this turn of the loop. What is sent to a link that has ended is lost."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._loop.call_soon(self._flush)

    def cut(self) -> None:
        """End the link."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """The socket is the loop's now."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        data = self._data + data if self._data else data
        at, size = 0, len(data)
        messages: list[M] = []
        try:
            while size - at >= _HEAD.size:
                (length,) = _HEAD.unpack_from(data, at)
                if length > MOST_FRAME_BYTES:
                    raise msgspec.DecodeError(f"a frame of {length} bytes, expected at most {MOST_FRAME_BYTES}")
                end = at + _HEAD.size + length
                if end > size:
                    break
                messages += self._decode(memoryview(data)[at + _HEAD.size : end])
                at = end
        except msgspec.DecodeError as error:
            _log.error("a link between processes of the server is cut: what came is no message (%s)", error)
            self.cut()
            return
        self._data = data[at:]
        if messages:
            self._on_messages(messages)

    def connection_lost(self, error: Exception | None) -> None:
        """The other end has gone."""
        self._transport = None
        self._data = b""
        self._on_lost()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        payload = self._encode(unsent)
        transport.write(_HEAD.pack(len(payload)) + payload)
        if transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            _log.error("a link between processes of the server is cut: the other end does not read")
            self.cut()


async def hand_over(bound: socket.socket, descriptor: int) -> int:
    """Give the other end of a socket that does not block a descriptor, and take the one that it gives.

    Raises OSError or EOFError where the other end goes.
    """
    loop = asyncio.get_running_loop()
    socket.send_fds(bound, [b"\0"], [descriptor])
    while True:
        came = asyncio.Event()
        loop.add_reader(bound, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(bound)
        try:
            data, descriptors, _, _ = socket.recv_fds(bound, 1, 1)
        except BlockingIOError:
            continue
        if not data or not descriptors:
            raise EOFError("the other process has gone")
        return descriptors[0]
