"""Messages between a server and its worker processes, over a pair of sockets.

SOCK_SEQPACKET keeps message boundaries, makes each message atomic (threads share an end without a lock), and carries
file descriptors. When the other side has died, `receive` gets an empty message.
"""

from __future__ import annotations

import array
import errno
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from cotenant.errors import CotenantError
from cotenant.execute.protocol import MOST_ANSWER_BYTES, Followed
from cotenant.execute.worker.shared_tensors import TensorLayout
from cotenant.repository.formats import Arithmetic
from cotenant.work import TaskTime, Work

MOST_MESSAGE_BYTES = 200 << 10
"""Largest message, and size of the receive buffer: it has names and shapes of tensors, not their values."""
_MOST_DESCRIPTORS = 3
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
"""Errors that mean that a message has to wait; any other error means that the other side is gone."""


class MessageError(CotenantError):
    """A message cannot be sent, though the other side is alive."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Open(_Message, frozen=True):
    """To a worker, first: the model to load. `graph` is the folder in `cache_dir` that the server opened.

    `follows` are the plans that the model follows, by run strategy.
    """

    tenant: str
    path: str
    cache_dir: str
    graph: str
    sessions: tuple[tuple[int | tuple[int, ...], tuple[tuple[int, int], ...]], ...]
    lane_nice: int
    arithmetic: Arithmetic = Arithmetic()
    follows: dict[str, Followed] = {}
    max_answer_bytes: int = MOST_ANSWER_BYTES
    release: str = ""
    """Version of the package of the engine, with which alone the worker is used."""


class AddLane(_Message, frozen=True):
    """To a worker, with the lane's socket and its buffers of inputs and outputs: run the lane's launches on `cores`."""

    cores: tuple[int, ...]


class Run(_Message, frozen=True):
    """To a lane: a launch. `inputs` of the batch are in the buffer at the first unit, and for each of several tasks."""

    id: int
    batch: int
    work: Work
    last: bool
    inputs: tuple[TensorLayout, ...] = ()
    part: bool = False
    stops: tuple[int, ...] = ()
    queries: ClassVar[tuple[int, ...]] = (0,)
    """One entry: a worker does not distinguish the queries of a batch."""


class ExpandRun(_Message, frozen=True):
    """To a worker: expand a launch to these cores at its next stop. From a worker, without cores: it was expanded."""

    launch: int
    cores: tuple[int, ...] = ()


class Prepare(_Message, frozen=True):
    """To a worker: load further sessions, and run each once on inputs of these shapes. Answered by SessionsPrepared."""

    sessions: tuple[tuple[int | tuple[int, ...], tuple[tuple[int, int], ...]], ...]
    shapes: dict[str, tuple[int, ...]]


class Keep(_Message, frozen=True):
    """To a worker: unload sessions of other numbers of threads, or cores, than these."""

    threads: tuple[int | tuple[int, ...], ...]


class ReleaseBatch(_Message, frozen=True):
    """To a worker: forget the tensors of a paused batch."""

    batch: int


class Reset(_Message, frozen=True):
    """To a worker, from the next engine: wait for the lanes to end, forget all batches, and answer with WasReset."""

    token: int


class Expect(_Message, frozen=True):
    """To a worker before Open: import what files that end in `suffix` need."""

    suffix: str


class Started(_Message, frozen=True):
    """From a worker: it is ready for Open."""


class Ready(_Message, frozen=True):
    """From a worker: its model is loaded."""


class SessionsPrepared(_Message, frozen=True):
    """From a worker: the sessions of a Prepare are loaded; with a `reason`, they cannot be loaded."""

    reason: str = ""


class WasReset(_Message, frozen=True):
    """From a worker: no lane runs any more. `model` has the sessions that the worker has now."""

    token: int
    model: Open


class Refused(_Message, frozen=True):
    """From a worker: its model cannot be loaded. `reason` and `hint` are those of ModelError."""

    reason: str
    hint: str


class Ended(_Message, frozen=True):
    """From a worker: a launch has ended. After the last unit, `outputs` are in the lane's buffer."""

    launch: int
    error: str | None
    input_ns: int
    infer_ns: int
    output_ns: int
    outputs: tuple[TensorLayout, ...] = ()
    task_times: tuple[TaskTime, ...] = ()
    steal_ns: int = 0


ToWorker = Expect | Open | AddLane | Prepare | Keep | ReleaseBatch | Run | ExpandRun | Reset
FromWorker = Started | Ready | SessionsPrepared | Refused | ExpandRun | Ended | WasReset
Message = ToWorker | FromWorker
_encode = msgspec.msgpack.encode


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray(MOST_MESSAGE_BYTES)
        self._view = memoryview(self._buffer)
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._posted: deque[bytes] = deque()
        self._posting = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Both ends of a new connection."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):  # room for the largest message, independent of the system's default
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_MESSAGE_BYTES)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        """The file descriptor of this end."""
        return self._socket.fileno()

    def wait_at_most(self, seconds: float) -> None:
        """Let `receive` raise TimeoutError after so many seconds; the kernel keeps the time."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, message: Message, *, waits: bool = False) -> None:
        """Send a message; with `waits` block until there is room.

        Raises MessageError when the message is too large or there is no room, OSError when the other side is gone.
        """
        data = _packed(message)
        try:
            self._socket.send(data, 0 if waits else socket.MSG_DONTWAIT)
        except OSError as error:
            raise _why(error, data) from None

    def send_with(self, message: Message, descriptors: Sequence[int]) -> None:
        """Send a message and copies of file descriptors; never blocks. Raises as `send`."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        data = _packed(message)
        try:
            self._socket.sendmsg([data], [rights], socket.MSG_DONTWAIT)
        except OSError as error:
            raise _why(error, data) from None

    def post(self, message: Message) -> None:
        """Queue a message, sent when there is room, in order; never blocks. See `flush`.

        Dropped without an error if the other side is gone. Raises MessageError when the message is too large.
        """
        data = _packed(message)
        with self._posting:
            self._posted.append(data)
        self.flush()

    def flush(self) -> None:
        """Send posted messages as far as there is room. Call it regularly."""
        if not self._posted:
            return
        with self._posting:
            while self._posted:
                try:
                    self._socket.send(self._posted[0], socket.MSG_DONTWAIT)
                except OSError as error:
                    if error.errno in _FULL:
                        return
                    self._posted.clear()
                    return
                self._posted.popleft()

    def receive(self, *, waits: bool = True) -> Message | None:
        """The next message; None when the other side is gone.

        Raises msgspec.MsgspecError, and TimeoutError when none comes in time (without `waits`: when none is there).
        """
        try:
            size = self._socket.recv_into(self._buffer, 0, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise TimeoutError("no message has come") from None
        except ConnectionError:
            return None
        return self._decoder.decode(self._view[:size]) if size else None

    def receive_with(self) -> tuple[Message | None, list[int]]:
        """Like `receive`, with the file descriptors of the message; the caller owns them."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, MOST_MESSAGE_BYTES, _MOST_DESCRIPTORS)
        return (self._decoder.decode(data) if data else None), descriptors

    def shut(self) -> None:
        """Send no more messages; the other side receives the end after pending messages."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # the other side is gone
            pass

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _packed(message: Message) -> bytes:
    data = _encode(message)
    if len(data) > MOST_MESSAGE_BYTES:
        raise _too_large(data)
    return data


def _why(error: OSError, data: bytes) -> Exception:
    """Translate an error of the system."""
    if error.errno in _FULL:
        return MessageError("the message queue is full: the other side has read no message for too long")
    return _too_large(data) if error.errno == errno.EMSGSIZE else error


def _too_large(data: bytes) -> MessageError:
    text = f"a message of {len(data)} bytes is too large, expected at most {MOST_MESSAGE_BYTES}"
    return MessageError(f"{text}: there are too many tensors, or ranges of units, or their names are too long")
