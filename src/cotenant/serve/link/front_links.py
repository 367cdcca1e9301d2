"""The engine's ends of its links to front-end processes: queries come in, and how they ended goes back."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from cotenant import shortages
from cotenant.core.admission import Gate
from cotenant.errors import CotenantError
from cotenant.serve.directory import Directory, ShutGates
from cotenant.serve.engine.loop import ServeLoop
from cotenant.serve.frontend.call_threads import LoopThreads
from cotenant.serve.frontend.loop_inbox import LoopInbox
from cotenant.serve.link.arena import Arena, ArenaFullError, ArenaReader, FreedBlocks, TensorPlace
from cotenant.serve.link.connection import ProcessLink, hand_over
from cotenant.serve.link.messages import (
    RETURNS,
    AskedQuery,
    CallResult,
    ControlCall,
    Declined,
    EndedQuery,
    Failed,
    Freed,
    Replied,
    Shortages,
    ToEngine,
    Withdraw,
)
from cotenant.types import ANSWERS
from cotenant.wire.api import Backend, InferRequest, InferResult, ServeError, Status

_CALL_THREADS = 16
_GATES_S = 0.001
"""What changes of gates within this time goes in one message: a full queue opens and shuts with each query."""
_log = logging.getLogger("cotenant.server")


class LinkedServer(Backend, Protocol):
    """The server, as links use it."""

    def directory(self) -> Directory:
        """What is served under which name."""

    @property
    def gates(self) -> Mapping[str, Gate]:
        """The gates of tenants that take no query now."""

    def submit_together(
        self, requests: Sequence[tuple[InferRequest, Callable[[InferResult], None]]]
    ) -> list[int | ServeError]:
        """Take queries that came at once. Gives the number of each, or the error that `submit` would have raised."""

    def replied_at(self, query: int, ended_ns: int, at_ns: int) -> None:
        """An answer was handed to its connection."""


class FrontLinks:
    """Links with all front-end processes that connect to a listening socket."""

    def __init__(self, server: LinkedServer, loop: ServeLoop, listening: socket.socket) -> None:
        self._server = server
        self._loop = loop
        self._listening = listening
        self._links: set[_FrontLink] = set()
        self._threads = LoopThreads(_CALL_THREADS, "cotenant-calls")
        self._accepting: asyncio.Task[None] | None = None
        self._inbox: LoopInbox | None = None
        self._told = b""
        self._are_gates_due = False

    def start(self) -> None:
        """Take links from now on."""
        self._loop.submit(self._begin()).result()

    def close(self) -> None:
        """Take no more links; those that there are end with the process."""
        self._threads.shutdown()
        if self._accepting is not None:
            task = self._accepting
            self._loop.submit(_cancelled(task))

    def changed(self) -> None:
        """Tell the front-ends, soon, of names and their states, if they are not as they were. From any thread."""
        if self._inbox is not None:
            self._inbox.put(self._publish_soon)

    def gates_changed(self) -> None:
        """Tell the front-ends, within _GATES_S, which tenants take no query. From any thread."""
        if self._inbox is not None and not self._are_gates_due:
            self._are_gates_due = True
            self._inbox.put(self._publish_gates_soon)

    async def _begin(self) -> None:
        self._inbox = LoopInbox()
        self._listening.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._inbox))

    async def _accept(self, inbox: LoopInbox) -> None:
        loop = asyncio.get_running_loop()
        while True:
            bound, _ = await loop.sock_accept(self._listening)
            try:
                bound.setblocking(False)
                link = _FrontLink(self._server, inbox, self._threads, self._publish, self._links.discard)
                await link.connect(bound)
            except (OSError, EOFError, CotenantError) as error:
                bound.close()
                _log.warning("a front-end process could not be linked: %s", error)
                continue
            self._links.add(link)
            link.send(self._server.directory())
            link.send(ShutGates(dict(self._server.gates)))

    def _publish_soon(self) -> None:  # the thread that says so may hold a lock
        asyncio.get_running_loop().call_soon(self._publish)

    def _publish_gates_soon(self) -> None:
        asyncio.get_running_loop().call_later(_GATES_S, self._publish_gates)

    def _publish_gates(self) -> None:
        self._are_gates_due = False
        gates = ShutGates(dict(self._server.gates))
        for link in self._links:
            link.send(gates)

    def _publish(self) -> None:
        directory = self._server.directory()
        told = msgspec.msgpack.encode(directory)
        if told != self._told:
            self._told = told
            for link in self._links:
                link.send(directory)


class _FrontLink:
    """The link with one front-end. All methods are called on the loop, but for what a query's end calls."""

    def __init__(
        self,
        server: LinkedServer,
        inbox: LoopInbox,
        threads: LoopThreads,
        publish: Callable[[], None],
        on_lost: Callable[[_FrontLink], None],
    ) -> None:
        self._server = server
        self._inbox = inbox
        self._threads = threads
        self._publish = publish
        self._on_lost = on_lost
        self._arena = Arena("cotenant-answers")
        self._freed = FreedBlocks(lambda: inbox.put(self._tell_freed))
        self._reader: ArenaReader | None = None
        self._link: ProcessLink[ToEngine] = ProcessLink(ToEngine, self._take, self._lost)
        self._queries: dict[int, int] = {}
        """Numbers of the queries inside, by their names on the link."""
        self._early: set[int] = set()
        """Names of queries that ended while they were being submitted."""
        self._unwritten: dict[int, int] = {}
        """Answers that were sent, and have not been said to be written: when they ended, by number."""
        self._is_over = False

    async def connect(self, bound: socket.socket) -> None:
        """Take the link. Raises OSError or EOFError."""
        try:
            theirs = await hand_over(bound, self._arena.descriptor)
            try:
                self._reader = ArenaReader(theirs, self._freed.add)
            finally:
                os.close(theirs)
        except BaseException:
            self._arena.close()
            raise
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self._link, bound)

    def send(self, message: object) -> None:
        """Send a message."""
        self._link.send(message)

    def _take(self, messages: Sequence[ToEngine]) -> None:
        asks: list[AskedQuery] = []
        for message in messages:
            if type(message) is AskedQuery:
                asks.append(message)
                continue
            if asks:  # in the order in which they came: one may be withdrawn by the next message
                self._ask(asks)
                asks = []
            match message:
                case Replied(query=query, ended_ns=ended_ns, at_ns=at_ns):
                    if self._unwritten.pop(query, None) is not None:
                        self._server.replied_at(query, ended_ns, at_ns)
                case Declined(model=model, arrival_ns=arrival_ns, error=error):
                    self._server.refused(model, arrival_ns, error.error)
                case Shortages(met=met):
                    shortages.add(met)
                case Freed(blocks=blocks):
                    for block in blocks:
                        self._arena.free(block)
                case Withdraw(ref=ref):
                    if (number := self._queries.get(ref)) is not None:
                        self._server.cancel(number)
                case ControlCall():
                    self._call(message)
        if asks:
            self._ask(asks)

    def _ask(self, asks: Sequence[AskedQuery]) -> None:
        """Submit queries that came at once."""
        try:
            requests = [(self._request(ask), partial(self._ended, ask.ref)) for ask in asks]
            found = self._server.submit_together(requests)
        except Exception:
            _log.exception("queries from a front-end process failed")
            text = "internal error; the server's log has the details"
            found = [ServeError(Status.INTERNAL, text)] * len(asks)
        for ask, number in zip(asks, found, strict=True):
            if isinstance(number, ServeError):
                self.send(Failed.of(ask.ref, number))
            elif ask.ref in self._early:
                self._early.discard(ask.ref)
            else:
                self._queries[ask.ref] = number

    def _request(self, ask: AskedQuery) -> InferRequest:
        assert self._reader is not None
        told = ask.outputs, ask.priority, ask.timeout_ns, ask.arrival_ns
        return InferRequest(ask.model, self._reader.read(ask.inputs), ask.version, "", *told)

    def _ended(self, ref: int, result: InferResult) -> None:
        """A query has ended, on any thread."""
        self._inbox.put(partial(self._tell_end, ref, result))

    def _tell_end(self, ref: int, result: InferResult) -> None:
        if self._queries.pop(ref, None) is None:
            self._early.add(ref)
        if self._is_over:
            self._early.discard(ref)
            if result.outcome in ANSWERS:
                self._server.replied(result)
            return
        place = TensorPlace()
        if result.outcome in ANSWERS:
            try:
                place = self._arena.write(result.outputs)
            except ArenaFullError as error:
                self._server.replied(result)
                self.send(Failed.of(ref, ServeError(Status.INTERNAL, str(error))))
                return
            self._unwritten[result.query] = result.ended_ns
        status = "" if result.status is None else result.status.name
        told = result.query, result.model_version, place, result.reason, status, result.ended_ns
        self.send(EndedQuery(ref, result.outcome, *told))

    def _call(self, call: ControlCall) -> None:
        if call.method not in RETURNS:
            self.send(Failed.of(call.ref, ServeError(Status.INTERNAL, f"there is no call {call.method!r}")))
            return
        method = getattr(self._server, call.method)

        def work() -> bytes:
            value: Any = method(*call.words)
            return msgspec.msgpack.encode(value)

        def told(value: bytes) -> None:
            if call.method in ("load", "unload"):
                self._publish()  # before its client hears of it
            self.send(CallResult(call.ref, msgspec.Raw(value)))

        def failed(error: BaseException) -> None:
            if not isinstance(error, ServeError):
                _log.error("a call of %r failed", call.method, exc_info=error)
                error = ServeError(Status.INTERNAL, "internal error; the server's log has the details")
            self.send(Failed.of(call.ref, error))

        future = self._threads.submit(work)
        self._inbox.when_done(future, told, failed)

    def _tell_freed(self) -> None:
        if blocks := self._freed.taken():
            self.send(Freed(blocks))

    def _lost(self) -> None:
        """The front-end has gone: nothing waits for its queries."""
        self._is_over = True
        self._on_lost(self)
        for number in list(self._queries.values()):
            self._server.cancel(number)
        for number, ended_ns in self._unwritten.items():
            self._server.replied_at(number, ended_ns, 0)
        self._arena.close()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
