"""A real, deterministic backend to test the front-ends against: small models, computed on a thread of their own.

`serving` runs both front-ends over any backend; `CountingBackend` wraps one and counts how often every query ended.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from cotenant.core.admission import Gate
from cotenant.serve.directory import Directory, Front, NameState
from cotenant.serve.engine.loop import ServeLoop
from cotenant.serve.frontend.grpc_server import GrpcServer
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.serve.link.front_links import FrontLinks
from cotenant.serve.link.remote_backend import RemoteBackend
from cotenant.types import ANSWERS, Outcome
from cotenant.wire.api import (
    Backend,
    Duration,
    IndexEntry,
    InferRequest,
    InferResult,
    ModelMetadata,
    ModelStatistics,
    ServeError,
    Status,
    TensorSpec,
)
from cotenant.wire.codec import DTYPES, Limits, validate

PLATFORM = "numpy"


def _model(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], max_batch: int = 0) -> ModelMetadata:
    return ModelMetadata(name, ("1",), PLATFORM, tuple(inputs), tuple(outputs), max_batch)


def _identity(name: str, datatype: str, shape: tuple[int, ...], max_batch: int = 0) -> ModelMetadata:
    return _model(name, [TensorSpec("x", datatype, shape)], [TensorSpec("y", datatype, shape)], max_batch)


def identity_name(datatype: str) -> str:
    """Name of the model that returns its input of this datatype, of any shape with two dimensions."""
    return f"identity_{datatype.lower()}"


_VECTOR = (-1, 4)
MODELS: dict[str, ModelMetadata] = {
    model.name: model
    for model in (
        *(_identity(identity_name(datatype), datatype, (-1, -1)) for datatype in DTYPES),
        _identity("tiny", "FP32", (-1, 16), 8),
        _identity("model with/odd name", "FP32", _VECTOR),
        _identity("fail", "FP32", _VECTOR),
        _identity("drop", "FP32", _VECTOR),
        _identity("reject", "FP32", _VECTOR),
        _identity("slow", "FP32", _VECTOR),
        _identity("inline", "FP32", _VECTOR),
        _identity("crash", "FP32", _VECTOR),
        _model(
            "add_sub",
            [TensorSpec("a", "INT32", _VECTOR), TensorSpec("b", "INT32", _VECTOR)],
            [TensorSpec("sum", "INT32", _VECTOR), TensorSpec("difference", "INT32", _VECTOR)],
            8,
        ),
    )
}
_REFUSALS = {
    "fail": (Outcome.FAILED, Status.INTERNAL, "the model raised: division by zero"),
    "drop": (Outcome.DROPPED, Status.UNAVAILABLE, "the deadline passed while the query was queued"),
    "reject": (Outcome.REJECTED, Status.UNAVAILABLE, "the queue of the tenant is full"),
}


class FakeBackend:
    """Serves MODELS. `slow` answers when `release` is called, its time-out passes or it is cancelled."""

    def __init__(self) -> None:
        self.accepting = True
        self.requests: list[InferRequest] = []
        self.cancelled: SimpleQueue[int] = SimpleQueue()
        self.shut: dict[str, ServeError] = {}
        """Why no query of a model is taken, as front-ends learn it before the body."""
        self.told: list[tuple[str, ServeError]] = []
        """Requests that were refused before they were queries."""
        self.replies: set[int] = set()
        """Queries with answers that were ready to be written."""
        self._unloaded: set[str] = set()
        self._numbers = itertools.count(1)
        self._counts: Counter[str] = Counter()
        self._waiting: dict[int, Callable[[InferResult], None]] = {}
        self._slow: dict[int, InferRequest] = {}
        self._lock = threading.Lock()
        self._work: SimpleQueue[tuple[int, InferRequest, Callable[[InferResult], None]] | None] = SimpleQueue()
        self.slow_arrived: SimpleQueue[int] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-backend", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.accepting

    def _known(self, model: str, version: str) -> ModelMetadata:
        metadata = MODELS.get(model)
        if metadata is None:
            raise ServeError(Status.NOT_FOUND, f"model {model[:80]!r} is unknown")
        if version not in ("", "1"):
            raise ServeError(Status.NOT_FOUND, f"model {model!r} has no version {version[:80]!r}, expected '1'")
        return metadata

    def model_ready(self, model: str, version: str) -> bool:
        self._known(model, version)
        return self.accepting and model not in self._unloaded

    def metadata(self, model: str, version: str) -> ModelMetadata:
        return self._known(model, version)

    def config(self, model: str, version: str) -> Mapping[str, Any]:
        metadata = self._known(model, version)
        skip = 1 if metadata.max_batch_size else 0

        def tensors(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
            return [
                {
                    "name": spec.name,
                    "data_type": "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}",
                    "dims": list(spec.shape[skip:]),
                }
                for spec in specs
            ]

        config: dict[str, Any] = {
            "name": model,
            "platform": PLATFORM,
            "backend": "fake",
            "max_batch_size": metadata.max_batch_size,
            "input": tensors(metadata.inputs),
            "output": tensors(metadata.outputs),
            "a_key_of_http_alone": 1,
        }
        if metadata.max_batch_size:
            config["dynamic_batching"] = {"max_queue_delay_microseconds": 100}
        return config

    def statistics(self, model: str, version: str) -> Sequence[ModelStatistics]:
        names = [self._known(model, version).name] if model else list(MODELS)
        none = Duration()
        return [
            ModelStatistics(
                name, "1", 0, self._counts[name], self._counts[name], Duration(self._counts[name], 1000), *[none] * 5
            )
            for name in names
        ]

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        entries = [IndexEntry(n, "1", "UNAVAILABLE" if n in self._unloaded else "READY") for n in MODELS]
        if not ready_only:
            entries.append(IndexEntry("broken", "1", "UNAVAILABLE", "model.onnx is no ONNX file"))
        return [entry for entry in entries if not ready_only or entry.state == "READY"]

    def load(self, model: str) -> None:
        self._known(model, "")
        self._unloaded.discard(model)

    def unload(self, model: str) -> None:
        self._known(model, "")
        self._unloaded.add(model)

    def refusal(self, model: str, version: str) -> ServeError | None:
        try:
            self._known(model, version)
        except ServeError as error:
            return error
        return self.shut.get(model)

    def refused(self, model: str, arrival_ns: int, error: ServeError) -> None:
        self.told.append((model, error))

    def submit(self, request: InferRequest, done: Callable[[InferResult], None]) -> int:
        metadata = self._known(request.model, request.version)
        if request.model in self._unloaded:
            raise ServeError(Status.UNAVAILABLE, f"model {request.model!r} is not loaded")
        validate(request, metadata)
        if request.model == "crash":
            raise RuntimeError("a bug of the backend, secret detail")
        number = next(self._numbers)
        with self._lock:
            self.requests = [*self.requests[-99:], request]
            self._waiting[number] = done
            self._counts[request.model] += 1
        if request.model == "inline":
            self._answer(number, request)
        elif request.model == "slow":
            with self._lock:
                self._slow[number] = request
            if request.timeout_ns is not None:
                timer = threading.Timer(
                    request.timeout_ns / 1e9,
                    self._finish,
                    [number, Outcome.DROPPED, Status.UNAVAILABLE, "the time-out of the query has passed"],
                )
                timer.daemon = True
                timer.start()
            self.slow_arrived.put(number)
        else:
            self._work.put((number, request, done))
        return number

    def release(self) -> None:
        """Let every `slow` query that waits be answered."""
        with self._lock:
            slow, self._slow = self._slow, {}
        for number, request in slow.items():
            self._work.put((number, request, self._waiting.get(number, lambda _: None)))

    def cancel(self, query: int) -> None:
        self.cancelled.put(query)
        self._finish(query, Outcome.CANCELLED, Status.CANCELLED, "the client withdrew the query")

    def replied(self, result: InferResult) -> None:
        self.replies.add(result.query)

    def replied_at(self, query: int, ended_ns: int, at_ns: int) -> None:
        self.replies.add(query)

    def submit_together(
        self, requests: Sequence[tuple[InferRequest, Callable[[InferResult], None]]]
    ) -> list[int | ServeError]:
        return together(self, requests)

    @property
    def gates(self) -> dict[str, Gate]:
        return {}

    def directory(self) -> Directory:
        fronts = {name: Front(known, "unloaded" * (name in self._unloaded)) for name, known in MODELS.items()}
        return Directory(self.accepting, {name: NameState({"": each, "1": each}) for name, each in fronts.items()})

    def metrics(self) -> bytes:
        return b"# TYPE fake_queries counter\nfake_queries %d\n" % sum(self._counts.values())

    def _finish(self, number: int, outcome: Outcome, status: Status, reason: str) -> None:
        with self._lock:
            done = self._waiting.pop(number, None)
            self._slow.pop(number, None)
        if done is not None:
            done(InferResult(outcome, number, reason=reason, status=status))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self._answer(item[0], item[1])

    def _answer(self, number: int, request: InferRequest) -> None:
        if request.model in _REFUSALS:
            self._finish(number, *_REFUSALS[request.model])
            return
        with self._lock:
            done = self._waiting.pop(number, None)
        if done is None:
            return
        outputs: dict[str, Any]
        if request.model == "add_sub":
            a, b = request.inputs["a"], request.inputs["b"]
            outputs = {"sum": a + b, "difference": a - b}
        else:
            outputs = {"y": request.inputs["x"]}
        if request.outputs:
            outputs = {name: outputs[name] for name in request.outputs}
        done(InferResult(Outcome.ANSWERED, number, "1", outputs))


def together(
    backend: Any, requests: Sequence[tuple[InferRequest, Callable[[InferResult], None]]]
) -> list[int | ServeError]:
    """Submit one after the other."""
    found: list[int | ServeError] = []
    for request, done in requests:
        try:
            found.append(backend.submit(request, done))
        except Exception as error:
            told = error if isinstance(error, ServeError) else ServeError(Status.INTERNAL, "internal error")
            found.append(told.with_traceback(None))
    return found


class CountingBackend:
    """Passes everything on to another backend and counts `done` calls, of which every accepted query must get one.

    An answer is then reported as written, or its query is withdrawn.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._changed = threading.Condition()
        self.accepted = 0
        self.failed = 0
        self.ended = 0
        self.twice = 0
        self._unwritten: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def submit(self, request: InferRequest, done: Callable[[InferResult], None]) -> int:
        calls = itertools.count()

        def counted(result: InferResult) -> None:
            with self._changed:
                if next(calls):
                    self.twice += 1
                else:
                    self.ended += 1
                if result.outcome in ANSWERS and request.arrival_ns:
                    self._unwritten.add(result.query)
                self._changed.notify_all()
            done(result)

        try:
            number = self._backend.submit(request, counted)
        except Exception:
            with self._changed:
                self.failed += 1
            raise
        with self._changed:
            self.accepted += 1
            self._changed.notify_all()
        return number

    def submit_together(
        self, requests: Sequence[tuple[InferRequest, Callable[[InferResult], None]]]
    ) -> list[int | ServeError]:
        return together(self, requests)

    def cancel(self, query: int) -> None:
        self._backend.cancel(query)
        self._written(query)

    def replied(self, result: InferResult) -> None:
        self._backend.replied(result)
        self._written(result.query)

    def replied_at(self, query: int, ended_ns: int, at_ns: int) -> None:
        self._backend.replied_at(query, ended_ns, at_ns)  # type: ignore[attr-defined]
        self._written(query)

    def _written(self, query: int) -> None:
        with self._changed:
            self._unwritten.discard(query)
            self._changed.notify_all()

    def settled(self, timeout_s: float = 10.0) -> bool:
        """Wait until every accepted query has ended and is reported; return whether each ended exactly once."""
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout_s) and self.twice == 0

    def _is_settled(self) -> bool:
        return self.ended == self.accepted and not self._unwritten


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int


MODES = ("here", "linked")
"""Front-ends call the backend, or a link to it, as those in processes of their own do."""


class LinkEnds:
    """Both ends of a link, for tests that cut it."""

    def __init__(self, remote: RemoteBackend, links: FrontLinks, opened: threading.Event) -> None:
        self._remote, self._links, self._opened = remote, links, opened

    def reopened(self) -> threading.Event:
        """Set when the link is open again after this."""
        self._opened.clear()
        return self._opened

    def cut(self, from_engine: bool) -> None:
        if not from_engine:
            self._remote._put(self._remote._link.cut)  # type: ignore[union-attr]
            return
        assert self._links._inbox is not None
        for each in list(self._links._links):
            self._links._inbox.put(each._link.cut)

    def are_arenas_empty(self, timeout_s: float = 10.0) -> bool:
        """Whether every block of both sides is let go of within the time."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            [link] = self._links._links
            arena, reader = self._remote._arena, self._remote._reader
            used = [each and each.used for each in (arena, link._arena)]
            if used == [0, 0]:
                return True
            os.sched_yield()
        print(f"in use: {used}; held: {reader and reader.held}, {link._reader and link._reader.held}")
        return False


@contextmanager
def linked(backend: Any, *, with_links: bool = False) -> Iterator[Any]:
    """A backend at the other end of a link, with its loop on a thread of its own; `with_links` its ends, too."""
    theirs, ours = ServeLoop(), ServeLoop()
    theirs.start()
    ours.start()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        path = f"{folder}/engine"
        listening.bind(path)
        listening.listen()
        links = FrontLinks(backend, theirs, listening)
        if (names := getattr(backend, "names", None)) is not None:
            names.on_change = links.changed
        links.start()
        is_open = threading.Event()
        remote = RemoteBackend(path, is_open.set)
        keeping = ours.submit(remote.keep())
        try:
            assert is_open.wait(30.0)
            yield (remote, LinkEnds(remote, links, is_open)) if with_links else remote
        finally:
            keeping.cancel()
            links.close()
            ours.stop()
            theirs.stop()
            for arena in (remote._arena, *(each._arena for each in links._links)):
                if arena is not None:
                    arena.close()


@contextmanager
def serving(backend: Any, limits: Limits | None = None, mode: str = "here") -> Iterator[Ports]:
    """Run both front-ends on free ports of the loopback interface, by default without a limit of malformed requests."""
    if mode == "linked":
        with linked(backend) as remote, serving(remote, limits) as ports:
            yield ports
        return
    limits = limits or Limits(max_malformed=1 << 30)
    http, grpc = HttpServer(backend, port=0, limits=limits), GrpcServer(backend, port=0, limits=limits)
    try:
        yield Ports(http.start(), grpc.start())
    finally:
        grpc.stop(0.1)
        http.stop(0.1)


def sample(datatype: str, shape: tuple[int, ...] = (3, 5), seed: int = 7) -> np.ndarray[Any, np.dtype[Any]]:
    """Make a tensor of a datatype with values over its whole range."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[datatype]
    if datatype == "BYTES":
        words = [
            bytes(rng.integers(32, 127, size=int(n), dtype=np.uint8)) for n in rng.integers(0, 9, math.prod(shape))
        ]
        array = np.empty(len(words), np.object_)
        array[:] = words
        return array.reshape(shape)
    if datatype == "BOOL":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, shape, dtype=dtype, endpoint=True)
    return rng.standard_normal(shape).astype(dtype)
