"""What a server and its worker processes say to each other, and how: small messages over a pair of sockets.

SOCK_SEQPACKET keeps the bounds of messages, makes each of them atomic (threads share an end without a lock), carries
file descriptors, and ends with an empty message when the other side has died, however it died.
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
"""What one side sends at most, and the other has room for: tensors lie elsewhere, this is their names and shapes."""
_MOST_DESCRIPTORS = 3
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
"""How the system says that a message has to wait; whatever else it says, the other side is gone."""


class MessageError(CotenantError):
    """A message cannot be sent, though the other side is there."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Open(_Message, frozen=True):
    """To a worker, first: the model to load. `graph` names the folder in `cache_dir` with what the server opened.

    `follows` is what the model is to follow, by run strategy.
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


class AddLane(_Message, frozen=True):
    """To a worker, with the lane's socket and its buffers of inputs and outputs: run what comes there on `cores`."""

    cores: tuple[int, ...]


class Run(_Message, frozen=True):
    """To a lane: what a Launch says. At the first unit, and with each part, the batch's `inputs` lie in its buffer."""

    id: int
    batch: int
    work: Work
    last: bool
    inputs: tuple[TensorLayout, ...] = ()
    part: bool = False
    stops: tuple[int, ...] = ()
    queries: ClassVar[tuple[int, ...]] = (0,)
    """As one: their rows are nobody's business in a worker."""


class GrowRun(_Message, frozen=True):
    """To a worker: let a launch go on with these cores from its next stop on. From it, without them: so it goes on."""

    launch: int
    cores: tuple[int, ...] = ()


class Prepare(_Message, frozen=True):
    """To a worker: load further sessions, and run each once on inputs of these shapes. Answered by SessionsPrepared."""

    sessions: tuple[tuple[int | tuple[int, ...], tuple[tuple[int, int], ...]], ...]
    shapes: dict[str, tuple[int, ...]]


class Keep(_Message, frozen=True):
    """To a worker: let go of the sessions of other numbers of threads, or cores, than these."""

    threads: tuple[int | tuple[int, ...], ...]


class ReleaseBatch(_Message, frozen=True):
    """To a worker: forget the tensors of a paused batch."""

    batch: int


class Started(_Message, frozen=True):
    """From a worker: it is up, and waits for Open."""


class Ready(_Message, frozen=True):
    """From a worker: its model is loaded."""


class SessionsPrepared(_Message, frozen=True):
    """From a worker: the sessions of a Prepare are there; with a `reason`, they cannot be loaded."""

    reason: str = ""


class Refused(_Message, frozen=True):
    """From a worker: its model cannot be loaded. `reason` and `mend` as in ModelError."""

    reason: str
    hint: str


class Ended(_Message, frozen=True):
    """From a worker: a launch has ended. After the last units, `outputs` lie in the lane's buffer."""

    launch: int
    error: str | None
    input_ns: int
    infer_ns: int
    output_ns: int
    outputs: tuple[TensorLayout, ...] = ()
    task_times: tuple[TaskTime, ...] = ()
    steal_ns: int = 0


ToWorker = Open | AddLane | Prepare | Keep | ReleaseBatch | Run | GrowRun
FromWorker = Started | Ready | SessionsPrepared | Refused | GrowRun | Ended
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
        for end in (ours, theirs):  # whatever the system's default: a message of any size that is sent passes
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_MESSAGE_BYTES)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        """The descriptor of this end."""
        return self._socket.fileno()

    def wait_at_most(self, seconds: float) -> None:
        """Let `receive` raise TimeoutError after so long. The kernel keeps the time: no further call per message."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, message: Message, *, waits: bool = False) -> None:
        """Send; `waits` for room, or never.

        Raises MessageError when the message is too large or there is no room for it, OSError when the other side is
        gone.
        """
        data = _packed(message)
        try:
            self._socket.send(data, 0 if waits else socket.MSG_DONTWAIT)
        except OSError as error:
            raise _why(error, data) from None

    def send_with(self, message: Message, descriptors: Sequence[int]) -> None:
        """Send a message and copies of file descriptors, and never wait. Raises as `send` does."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        data = _packed(message)
        try:
            self._socket.sendmsg([data], [rights], socket.MSG_DONTWAIT)
        except OSError as error:
            raise _why(error, data) from None

    def post(self, message: Message) -> None:
        """Send as soon as there is room, after what was posted before, and never wait: see `flush`.

        Who is gone gets nothing, and no error. Raises MessageError when the message is too large.
        """
        data = _packed(message)
        with self._posting:
            self._posted.append(data)
        self.flush()

    def flush(self) -> None:
        """Send what was posted, as far as there is room; to be called now and then."""
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
        """The next message; None when the other side has gone. Raises msgspec.MsgspecError, and TimeoutError when none
        has come in time, or, where it `waits` for none, none is there."""
        try:
            size = self._socket.recv_into(self._buffer, 0, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise TimeoutError("no message has come") from None
        except ConnectionError:
            return None
        return self._decoder.decode(self._view[:size]) if size else None

    def receive_with(self) -> tuple[Message | None, list[int]]:
        """As `receive`, with the file descriptors that came along; they belong to the caller."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, MOST_MESSAGE_BYTES, _MOST_DESCRIPTORS)
        return (self._decoder.decode(data) if data else None), descriptors

    def shut(self) -> None:
        """Send nothing more: the other side finds the end after what is under way."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # it is gone already
            pass

    def close(self) -> None:
        """Let go of this end."""
        self._socket.close()


def _packed(message: Message) -> bytes:
    data = _encode(message)
    if len(data) > MOST_MESSAGE_BYTES:
        raise _too_large(data)
    return data


def _why(error: OSError, data: bytes) -> Exception:
    """What an error of the system's means here."""
    if error.errno in _FULL:
        return MessageError("the other side has taken no message for too long: there is no room for another one")
    return _too_large(data) if error.errno == errno.EMSGSIZE else error


def _too_large(data: bytes) -> MessageError:
    text = f"a message of {len(data)} bytes is too large, expected at most {MOST_MESSAGE_BYTES}"
    return MessageError(f"{text}: there are too many tensors, or ranges of units, or their names are too long")
