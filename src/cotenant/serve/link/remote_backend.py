"""The server as a front-end in a process of its own sees it: queries and calls go over a link to the engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from cotenant import shortages
from cotenant.core.admission import OPEN, Gate
from cotenant.errors import CotenantError
from cotenant.serve.directory import Directory, ShutGates, refusal_of
from cotenant.serve.frontend.loop_inbox import LoopInbox
from cotenant.serve.link.arena import Arena, ArenaFullError, ArenaReader, FreedBlocks
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
    ToFrontend,
    Withdraw,
)
from cotenant.types import ANSWERS, Outcome
from cotenant.wire.api import (
    IndexEntry,
    InferRequest,
    InferResult,
    ModelMetadata,
    ModelStatistics,
    ServeError,
    Status,
    unanswered,
)
from cotenant.wire.codec import validate
from cotenant.wire.ending import FAILURE

_RETRY_S = 0.05
_TELL_EVERY_S = 1.0
"""How often the engine is told of wants of resources, if there are any."""
_log = logging.getLogger("cotenant.frontend")
Done = Callable[[InferResult], None]


def _away() -> ServeError:
    return ServeError(Status.UNAVAILABLE, "the server's engine is being started: try again in a moment")


class RemoteBackend:
    """Implements `Backend` over a link to the engine process that listens at `path`.

    While there is no engine, queries are refused as unavailable, and nothing is ready. `on_open` is called on the loop
    whenever the engine says that it accepts queries. Made anywhere, `keep` runs on the loop of the front-ends.
    """

    def __init__(self, path: str, on_open: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._on_open = on_open
        self._lock = threading.Lock()
        self._refs = itertools.count(1)
        self._asked: dict[int, Done] = {}
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        """Calls that the engine has not answered: their methods, and what waits."""
        self._link: ProcessLink[ToFrontend] | None = None
        self._arena: Arena | None = None
        self._reader: ArenaReader | None = None
        self._inbox: LoopInbox | None = None
        self._thread = 0
        self._directory = Directory()
        self._shut: Mapping[str, Gate] = {}
        self._met = shortages.counts()

    # --- the link -------------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Hold a link to the engine, and make a new one when it ends. Runs until it is cancelled."""
        self._inbox = LoopInbox()
        self._thread = threading.get_ident()
        while True:
            try:
                lost = await self._connected()
            except (OSError, EOFError) as error:
                _log.debug("no link to the engine yet: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            while not lost.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(lost.wait(), _TELL_EVERY_S)
                self._tell_shortages()

    def _tell_shortages(self) -> None:
        met = shortages.counts()
        new = {
            each.value: times - self._met.get(each, 0) for each, times in met.items() if times > self._met.get(each, 0)
        }
        if new and self._link is not None:
            self._link.send(Shortages(new))
            self._met = met

    async def _connected(self) -> asyncio.Event:
        loop = asyncio.get_running_loop()
        lost = asyncio.Event()
        arena = Arena("cotenant-inputs")
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            bound.setblocking(False)
            await loop.sock_connect(bound, self._path)
            theirs = await hand_over(bound, arena.descriptor)
        except BaseException:
            bound.close()
            arena.close()
            raise

        def on_lost() -> None:
            self._lose(arena)
            lost.set()

        def tell_freed() -> None:
            link.send(Freed(freed.taken()))  # of this link's arena: another one has blocks of the same numbers

        link: ProcessLink[ToFrontend] = ProcessLink(ToFrontend, self._take, on_lost)
        freed = FreedBlocks(lambda: self._put(tell_freed))
        try:
            reader = ArenaReader(theirs, freed.add)
        finally:
            os.close(theirs)
        with self._lock:
            self._link, self._arena, self._reader = link, arena, reader
        await loop.create_unix_connection(lambda: link, sock=bound)
        return lost

    def _put(self, call: Callable[..., None], *words: Any) -> None:
        """Have a call made on the loop."""
        assert self._inbox is not None
        self._inbox.put(lambda: call(*words))

    def _send(self, link: ProcessLink[ToFrontend], message: object) -> None:
        if threading.get_ident() == self._thread:
            link.send(message)
        else:
            self._put(link.send, message)

    def _lose(self, arena: Arena) -> None:
        """The engine has gone, with all that it was asked."""
        with self._lock:
            asked, self._asked = self._asked, {}
            calls, self._calls = self._calls, {}
            self._link = self._arena = self._reader = None
            self._directory, self._shut = Directory(), {}
            arena.close()
        for done in asked.values():
            _tell(done, _refused(ServeError(Status.UNAVAILABLE, _LOST, FAILURE)))
        for _, future in calls.values():
            future.set_exception(_away())

    def _take(self, messages: Sequence[ToFrontend]) -> None:
        for message in messages:
            match message:
                case EndedQuery():
                    self._ended(message)
                case Failed(ref=ref):
                    self._failed(ref, message.error)
                case CallResult(ref=ref, value=value):
                    if (call := self._calls.pop(ref, None)) is not None:
                        method, future = call
                        future.set_result(msgspec.msgpack.decode(value, type=RETURNS[method]))
                case Freed(blocks=blocks):
                    with self._lock:
                        if self._arena is not None:
                            for block in blocks:
                                self._arena.free(block)
                case ShutGates(gates=gates):
                    self._shut = gates
                case Directory():
                    is_news = message.is_open and not self._directory.is_open
                    self._directory = message
                    if is_news:
                        self._on_open()

    def _ended(self, ended: EndedQuery) -> None:
        done = self._asked.pop(ended.ref, None)
        reader = self._reader
        if done is None or reader is None:
            return
        if ended.outcome not in ANSWERS:
            status = Status[ended.status] if ended.status else Status.INTERNAL
            result = InferResult(ended.outcome, ended.query, ended.version, reason=ended.reason, status=status)
            _tell(done, result)
            return
        try:
            outputs = reader.read(ended.outputs)
        except CotenantError as error:
            _tell(done, unanswered(Outcome.FAILED, ended.query, ended.version, str(error)))
            return
        _tell(done, InferResult(ended.outcome, ended.query, ended.version, outputs, ended_ns=ended.ended_ns))

    def _failed(self, ref: int, error: ServeError) -> None:
        if (done := self._asked.pop(ref, None)) is not None:
            _tell(done, _refused(error))
        elif (call := self._calls.pop(ref, None)) is not None:
            call[1].set_exception(error)

    # --- Backend --------------------------------------------------------------------------------------------------

    def live(self) -> bool:
        """The front-end can answer."""
        return True

    def ready(self) -> bool:
        """Whether the engine accepts queries, as far as it has said."""
        return self._directory.is_open

    def model_ready(self, model: str, version: str) -> bool:
        """Whether a model accepts queries. Raises ServeError (NOT_FOUND)."""
        return self._directory.is_ready(model, version)

    def metadata(self, model: str, version: str) -> ModelMetadata:
        """What the engine has told of a model. Raises ServeError."""
        return self._directory.find(model, version).metadata

    def refusal(self, model: str, version: str) -> ServeError | None:
        """Why no query of a model is taken now, as far as the engine has said."""
        state = self._directory.names.get(model)
        front = None if state is None else state.fronts.get(version)
        if front is not None:
            gate = self._shut.get(front.tenant, OPEN)
            return None if gate is OPEN else refusal_of(front.tenant, gate, time.monotonic_ns())
        try:
            self._directory.find(model, version)
        except ServeError as error:
            return error
        return None

    def refused(self, model: str, arrival_ns: int, error: ServeError) -> None:
        """Tell the engine of a request that never was a query."""
        if (link := self._link) is not None:
            self._send(link, Declined(model, arrival_ns, Failed.of(0, error)))

    def submit(self, request: InferRequest, done: Done) -> int:
        """Check a query and send it to the engine; gives its name on the link, for `cancel`."""
        validate(request, self._directory.find(request.model, request.version).metadata)
        with self._lock:
            link, arena = self._link, self._arena
            if link is None or arena is None:
                raise _away()
            try:
                place = arena.write(request.inputs)
            except ArenaFullError as error:
                raise ServeError(Status.UNAVAILABLE, str(error)) from None
            ref = next(self._refs)
            self._asked[ref] = done
        told = request.outputs, request.priority, request.timeout_ns, request.arrival_ns or time.monotonic_ns()
        self._send(link, AskedQuery(ref, request.model, request.version, place, *told))
        return ref

    def cancel(self, query: int) -> None:
        """Withdraw a query."""
        link = self._link
        if link is not None and query in self._asked:
            self._send(link, Withdraw(query))

    def replied(self, result: InferResult) -> None:
        """Tell the engine when an answer was written."""
        link = self._link
        if link is not None and result.outcome in ANSWERS:
            self._send(link, Replied(result.query, result.ended_ns, time.monotonic_ns()))

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        """The model's configuration, from the engine. Blocks."""
        found: Mapping[str, Any] = self._called("config", model, version)
        return found

    def statistics(self, model: str, version: str) -> Sequence[ModelStatistics]:
        """The engine's counters. Blocks."""
        found: Sequence[ModelStatistics] = self._called("statistics", model, version)
        return found

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """The engine's index. Blocks."""
        found: Sequence[IndexEntry] = self._called("index", ready_only)
        return found

    def load(self, model: str) -> None:
        """Have the engine load a model. Blocks."""
        self._called("load", model)

    def unload(self, model: str) -> None:
        """Have the engine unload a model. Blocks."""
        self._called("unload", model)

    def metrics(self) -> bytes:
        """The engine's metrics page. Blocks."""
        page: bytes = self._called("metrics")
        return page

    def plan(self) -> Mapping[str, Any]:
        """The plan that the engine runs. Blocks."""
        found: Mapping[str, Any] = self._called("plan")
        return found

    def _called(self, method: str, *words: Any) -> Any:
        """What a call of the engine gives, on a thread that is not the loop's. Raises ServeError."""
        future: Future[Any] = Future()
        with self._lock:
            link = self._link
            if link is None:
                raise _away()
            ref = next(self._refs)
            self._calls[ref] = method, future
        self._send(link, ControlCall(ref, method, words))
        return future.result()


_LOST = "the server's engine ended while it had this query: whether it ran is not known"


def _refused(error: ServeError) -> InferResult:
    return InferResult(error.ending.outcome, 0, reason=error.message, status=error.status, refusal=error)


def _tell(done: Done, result: InferResult) -> None:
    try:
        done(result)
    except Exception:
        _log.exception("an answer could not be handed over")
