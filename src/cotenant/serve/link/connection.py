"""One end of a link: batched messages in both directions over a stream socket."""

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
"""Unread bytes at which the peer counts as hung and the link is closed."""
_log = logging.getLogger("cotenant.link")


class ProcessLink(asyncio.Protocol, Generic[M]):
    """End of a link on the running loop. All methods and callbacks run on the loop. `on_messages` gets all messages of
    one read; `on_lost` is called once when the link ends."""

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
        """Queue a message; all messages of a loop iteration are written together. A closed link drops them."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._loop.call_soon(self._flush)

    def cut(self) -> None:
        """Close the link at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Store the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Decode all complete messages and pass them on."""
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
            _log.error(
                "a link between the server's processes is closed: invalid message (%s); the process connects again",
                error,
            )
            self.cut()
            return
        self._data = data[at:]
        if messages:
            self._on_messages(messages)

    def connection_lost(self, error: Exception | None) -> None:
        """Report that the link has ended."""
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
            _log.error("a link between the server's processes is closed: the other end does not read; it is reopened")
            self.cut()


async def hand_over(bound: socket.socket, descriptor: int) -> int:
    """Exchange file descriptors with the other end of a non-blocking socket; returns the received one. Raises OSError
    or EOFError if the other end closes."""
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
            raise EOFError("the other process has ended")
        return descriptors[0]
