"""Backend of a front-end process: queries and calls go over a link to the engine process."""

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
    CallResult,
    ControlCall,
    Declined,
    EndedQuery,
    Failed,
    Freed,
    QueryRequest,
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
_SHORTAGES_EVERY_S = 1.0
"""Seconds between reports of resource shortages to the engine."""
_log = logging.getLogger("cotenant.frontend")
Done = Callable[[InferResult], None]


def _engine_unavailable() -> ServeError:
    return ServeError(Status.UNAVAILABLE, "the server's engine is starting; try again in a moment")


class RemoteBackend:
    """`Backend` over a link to the engine process that listens at `path`.

    Without an engine, queries are refused as UNAVAILABLE and no model is ready. `on_open` is called on the loop
    whenever the engine begins to accept queries. `keep` runs on the loop of the front-ends.
    """

    def __init__(self, path: str, on_open: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._on_open = on_open
        self._lock = threading.Lock()
        self._refs = itertools.count(1)
        self._pending: dict[int, Done] = {}
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        """Unanswered calls by reference: method and future."""
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
        """Keep a link to the engine, and reconnect when it ends. Runs until cancelled."""
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
                    await asyncio.wait_for(lost.wait(), _SHORTAGES_EVERY_S)
                self._send_shortages()

    def _send_shortages(self) -> None:
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

        def send_freed() -> None:
            link.send(Freed(freed.taken()))  # block offsets are valid for this link's arena only

        link: ProcessLink[ToFrontend] = ProcessLink(ToFrontend, self._take, on_lost)
        freed = FreedBlocks(lambda: self._put(send_freed))
        try:
            reader = ArenaReader(theirs, freed.add)
        finally:
            os.close(theirs)
        with self._lock:
            self._link, self._arena, self._reader = link, arena, reader
        await loop.create_unix_connection(lambda: link, sock=bound)
        return lost

    def _put(self, call: Callable[..., None], *words: Any) -> None:
        """Call a function on the loop."""
        assert self._inbox is not None
        self._inbox.put(lambda: call(*words))

    def _send(self, link: ProcessLink[ToFrontend], message: object) -> None:
        if threading.get_ident() == self._thread:
            link.send(message)
        else:
            self._put(link.send, message)

    def _lose(self, arena: Arena) -> None:
        """Fail all pending queries and calls after the engine process has ended."""
        with self._lock:
            pending, self._pending = self._pending, {}
            calls, self._calls = self._calls, {}
            self._link = self._arena = self._reader = None
            self._directory, self._shut = Directory(), {}
            arena.close()
        for done in pending.values():
            _deliver(done, _refused_result(ServeError(Status.UNAVAILABLE, _LOST, FAILURE)))
        for _, future in calls.values():
            future.set_exception(_engine_unavailable())

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
        done = self._pending.pop(ended.ref, None)
        reader = self._reader
        if done is None or reader is None:
            return
        if ended.outcome not in ANSWERS:
            status = Status[ended.status] if ended.status else Status.INTERNAL
            result = InferResult(ended.outcome, ended.query, ended.version, reason=ended.reason, status=status)
            _deliver(done, result)
            return
        try:
            outputs = reader.read(ended.outputs)
        except CotenantError as error:
            _deliver(done, unanswered(Outcome.FAILED, ended.query, ended.version, str(error)))
            return
        _deliver(done, InferResult(ended.outcome, ended.query, ended.version, outputs, ended_ns=ended.ended_ns))

    def _failed(self, ref: int, error: ServeError) -> None:
        if (done := self._pending.pop(ref, None)) is not None:
            _deliver(done, _refused_result(error))
        elif (call := self._calls.pop(ref, None)) is not None:
            call[1].set_exception(error)

    # --- Backend --------------------------------------------------------------------------------------------------

    def live(self) -> bool:
        """True: the front-end can answer."""
        return True

    def ready(self) -> bool:
        """Whether the engine accepts queries, by its last directory."""
        return self._directory.is_open

    def model_ready(self, model: str, version: str) -> bool:
        """Whether a model accepts queries. Raises ServeError (NOT_FOUND)."""
        return self._directory.is_ready(model, version)

    def metadata(self, model: str, version: str) -> ModelMetadata:
        """Metadata of a model, from the engine's last directory. Raises ServeError."""
        return self._directory.find(model, version).metadata

    def refusal(self, model: str, version: str) -> ServeError | None:
        """Why every query of a model is refused now, by the engine's last messages; None if not known."""
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
        """Report a refused request to the engine."""
        if (link := self._link) is not None:
            self._send(link, Declined(model, arrival_ns, Failed.of(0, error)))

    def submit(self, request: InferRequest, done: Done) -> int:
        """Validate a query and send it to the engine. Returns its reference on the link, for `cancel`."""
        validate(request, self._directory.find(request.model, request.version).metadata)
        with self._lock:
            link, arena = self._link, self._arena
            if link is None or arena is None:
                raise _engine_unavailable()
            try:
                place = arena.write(request.inputs)
            except ArenaFullError as error:
                raise ServeError(Status.UNAVAILABLE, str(error)) from None
            ref = next(self._refs)
            self._pending[ref] = done
        rest = request.outputs, request.priority, request.timeout_ns, request.arrival_ns or time.monotonic_ns()
        self._send(link, QueryRequest(ref, request.model, request.version, place, *rest))
        return ref

    def cancel(self, query: int) -> None:
        """Withdraw a query; an ended query is ignored."""
        link = self._link
        if link is not None and query in self._pending:
            self._send(link, Withdraw(query))

    def replied(self, result: InferResult) -> None:
        """Report to the engine that an answer was written."""
        link = self._link
        if link is not None and result.outcome in ANSWERS:
            self._send(link, Replied(result.query, result.ended_ns, time.monotonic_ns()))

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        """Configuration of a model, from the engine. Blocks."""
        found: Mapping[str, Any] = self._called("config", model, version)
        return found

    def statistics(self, model: str, version: str) -> Sequence[ModelStatistics]:
        """Counters, from the engine. Blocks."""
        found: Sequence[ModelStatistics] = self._called("statistics", model, version)
        return found

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """Repository index, from the engine. Blocks."""
        found: Sequence[IndexEntry] = self._called("index", ready_only)
        return found

    def load(self, model: str) -> None:
        """Load a model in the engine. Blocks."""
        self._called("load", model)

    def unload(self, model: str) -> None:
        """Unload a model in the engine. Blocks."""
        self._called("unload", model)

    def metrics(self) -> bytes:
        """Metrics page, from the engine. Blocks."""
        page: bytes = self._called("metrics")
        return page

    def plan(self) -> Mapping[str, Any]:
        """Running plan, from the engine. Blocks."""
        found: Mapping[str, Any] = self._called("plan")
        return found

    def _called(self, method: str, *words: Any) -> Any:
        """Call a method of the engine and wait for its result. Not on the loop's thread. Raises ServeError."""
        future: Future[Any] = Future()
        with self._lock:
            link = self._link
            if link is None:
                raise _engine_unavailable()
            ref = next(self._refs)
            self._calls[ref] = method, future
        self._send(link, ControlCall(ref, method, words))
        return future.result()


_LOST = "the server's engine process ended while it had this query: it may or may not have run"


def _refused_result(error: ServeError) -> InferResult:
    return InferResult(error.ending.outcome, 0, reason=error.message, status=error.status, refusal=error)


def _deliver(done: Done, result: InferResult) -> None:
    try:
        done(result)
    except Exception:
        _log.exception("an answer could not be passed to its connection")
