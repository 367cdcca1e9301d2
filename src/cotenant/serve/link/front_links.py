"""Engine side of the links to front-end processes: receives queries, sends their outcomes."""

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
    CallResult,
    ControlCall,
    Declined,
    EndedQuery,
    Failed,
    Freed,
    QueryRequest,
    Replied,
    Shortages,
    ToEngine,
    Withdraw,
)
from cotenant.types import ANSWERS
from cotenant.wire.api import Backend, InferRequest, InferResult, ServeError, Status

_CALL_THREADS = 16
_GATES_S = 0.001
"""Seconds for which gate changes are gathered into one message: a full queue opens and shuts with each query."""
_log = logging.getLogger("cotenant.server")


class LinkedServer(Backend, Protocol):
    """The server as links use it."""

    def directory(self) -> Directory:
        """Directory of all names."""

    @property
    def gates(self) -> Mapping[str, Gate]:
        """Shut gates by tenant."""

    def submit_together(
        self, requests: Sequence[tuple[InferRequest, Callable[[InferResult], None]]]
    ) -> list[int | ServeError]:
        """Submit queries that came together. Returns the number of each, or the error that `submit` would raise."""

    def replied_at(self, query: int, ended_ns: int, at_ns: int) -> None:
        """Record that an answer was passed to its connection."""


class FrontLinks:
    """Links to all front-end processes that connect to a listening socket."""

    def __init__(self, server: LinkedServer, loop: ServeLoop, listening: socket.socket) -> None:
        self._server = server
        self._loop = loop
        self._listening = listening
        self._links: set[_FrontLink] = set()
        self._threads = LoopThreads(_CALL_THREADS, "cotenant-calls")
        self._accepting: asyncio.Task[None] | None = None
        self._inbox: LoopInbox | None = None
        self._sent_directory = b""
        self._are_gates_due = False

    def start(self) -> None:
        """Start accepting links."""
        self._loop.submit(self._begin()).result()

    def close(self) -> None:
        """Stop accepting links; open links end with the process."""
        self._threads.shutdown()
        if self._accepting is not None:
            task = self._accepting
            self._loop.submit(_cancelled(task))

    def changed(self) -> None:
        """Schedule sending the directory to the front-ends if it has changed. Safe on any thread."""
        if self._inbox is not None:
            self._inbox.put(self._publish_soon)

    def gates_changed(self) -> None:
        """Schedule sending the shut gates to the front-ends within _GATES_S. Safe on any thread."""
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
                _log.warning("the link to a front-end process failed: %s; the process tries again", error)
                continue
            self._links.add(link)
            link.send(self._server.directory())
            link.send(ShutGates(dict(self._server.gates)))

    def _publish_soon(self) -> None:  # later, as the calling thread may hold a lock
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
        encoded = msgspec.msgpack.encode(directory)
        if encoded != self._sent_directory:
            self._sent_directory = encoded
            for link in self._links:
                link.send(directory)


class _FrontLink:
    """Link to one front-end. All methods run on the loop, except `_ended`."""

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
        self._freed = FreedBlocks(lambda: inbox.put(self._send_freed))
        self._reader: ArenaReader | None = None
        self._link: ProcessLink[ToEngine] = ProcessLink(ToEngine, self._take, self._lost)
        self._queries: dict[int, int] = {}
        """Numbers of live queries by their references on the link."""
        self._early: set[int] = set()
        """References of queries that ended during their submission."""
        self._unwritten: dict[int, int] = {}
        """End times in ns of queries with an answer sent and not yet reported as written, by number."""
        self._is_over = False

    async def connect(self, bound: socket.socket) -> None:
        """Exchange arenas and open the link. Raises OSError or EOFError."""
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
        requests: list[QueryRequest] = []
        for message in messages:
            if type(message) is QueryRequest:
                requests.append(message)
                continue
            if requests:  # keep the order: the next message may withdraw one
                self._submit(requests)
                requests = []
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
        if requests:
            self._submit(requests)

    def _submit(self, requests: Sequence[QueryRequest]) -> None:
        """Submit queries that came together."""
        try:
            submissions = [(self._infer_request(each), partial(self._ended, each.ref)) for each in requests]
            found = self._server.submit_together(submissions)
        except Exception:
            _log.exception("%d queries of a front-end process could not be submitted", len(requests))
            text = "internal error; the server's log has the details"
            found = [ServeError(Status.INTERNAL, text)] * len(requests)
        for request, number in zip(requests, found, strict=True):
            if isinstance(number, ServeError):
                self.send(Failed.of(request.ref, number))
            elif request.ref in self._early:
                self._early.discard(request.ref)
            else:
                self._queries[request.ref] = number

    def _infer_request(self, request: QueryRequest) -> InferRequest:
        assert self._reader is not None
        rest = request.outputs, request.priority, request.timeout_ns, request.arrival_ns
        return InferRequest(request.model, self._reader.read(request.inputs), request.version, "", *rest)

    def _ended(self, ref: int, result: InferResult) -> None:
        """Handle the end of a query; runs on any thread."""
        self._inbox.put(partial(self._send_end, ref, result))

    def _send_end(self, ref: int, result: InferResult) -> None:
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
        rest = result.query, result.model_version, place, result.reason, status, result.ended_ns
        self.send(EndedQuery(ref, result.outcome, *rest))

    def _call(self, call: ControlCall) -> None:
        if call.method not in RETURNS:
            self.send(Failed.of(call.ref, ServeError(Status.INTERNAL, f"the engine has no method {call.method!r}")))
            return
        method = getattr(self._server, call.method)

        def work() -> bytes:
            value: Any = method(*call.words)
            return msgspec.msgpack.encode(value)

        def succeeded(value: bytes) -> None:
            if call.method in ("load", "unload"):
                self._publish()  # before the client gets the answer
            self.send(CallResult(call.ref, msgspec.Raw(value)))

        def failed(error: BaseException) -> None:
            if not isinstance(error, ServeError):
                _log.error("the call %r of a front-end process failed", call.method, exc_info=error)
                error = ServeError(Status.INTERNAL, "internal error; the server's log has the details")
            self.send(Failed.of(call.ref, error))

        future = self._threads.submit(work)
        self._inbox.when_done(future, succeeded, failed)

    def _send_freed(self) -> None:
        if blocks := self._freed.taken():
            self.send(Freed(blocks))

    def _lost(self) -> None:
        """Cancel all queries of a front-end that has ended."""
        self._is_over = True
        self._on_lost(self)
        for number in list(self._queries.values()):
            self._server.cancel(number)
        for number, ended_ns in self._unwritten.items():
            self._server.replied_at(number, ended_ns, 0)
        self._arena.close()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
