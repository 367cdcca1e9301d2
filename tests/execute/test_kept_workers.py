"""Workers that outlive the engine: started by a keeper, taken over by the next engine, or ended."""

from __future__ import annotations

import errno
import gc
import os
import queue
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from msgspec.structs import replace

from cotenant import __version__
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.worker import worker_keeper
from cotenant.execute.worker.channel import (
    AddLane,
    Channel,
    Ended,
    Keep,
    Open,
    Prepare,
    Ready,
    Reset,
    Run,
    SessionsPrepared,
    Started,
    WasReset,
)
from cotenant.execute.worker.kept_workers import KeptWorker, KeptWorkers
from cotenant.execute.worker.limits import WorkerLimits
from cotenant.execute.worker.shared_tensors import SharedBuffer
from cotenant.execute.worker.worker_keeper import WorkerKeeper
from cotenant.work import Work
from repositories import X, scaled
from workers import CORE, WAIT_S, Host, Hosts, gone

SESSIONS = ((1, ((0, 2), (0, 1), (1, 2))),)
Y = 2 * X["x"] / (1 + abs(X["x"]))


class Keeping:
    """A keeper on a thread of its own, and the engines that it serves."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.keeper = WorkerKeeper(self._selector)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._woken, self._waking = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._work)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_over = False
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select():
                key.data()

    def _work(self) -> None:
        self._woken.recv(1)
        call, future = self._calls.get()
        future.set_result(call())

    def call(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((function, future))
        self._waking.send(b"\0")
        return future.result(WAIT_S)

    def engine(self) -> KeptWorkers:
        return KeptWorkers(self.call(self.keeper.connect))

    def end(self) -> None:
        self._is_over = True
        self.keeper.close()

    def close(self) -> None:
        self.call(self.end)
        self._thread.join(WAIT_S)
        for each in (self._woken, self._waking, self._selector):
            each.close()


@pytest.fixture
def keeping() -> Iterator[Keeping]:
    made = Keeping()
    yield made
    made.close()


def die(engine: KeptWorkers, *workers: KeptWorker) -> None:
    """What the system does with the descriptors of an engine that is killed."""
    engine._link._socket.shutdown(socket.SHUT_RDWR)
    engine._thread.join(WAIT_S)
    engine._link.close()
    for worker in workers:
        worker.channel.close()
        os.close(worker._pidfd)
        os.close(worker._statm)


def opened(worker: KeptWorker, folder: Path) -> None:
    """The worker loads the model "a", whose file is in a folder."""
    path = folder / "a.onnx"
    onnx.save(scaled(2.0), path)
    with SegmentedModel.open(path, cache_dir=folder / "graphs") as model:
        graph = model.graph_path.parent
    assert worker.channel.receive() == Started()
    worker.channel.send(Open("a", str(path), str(graph.parent), graph.name, SESSIONS, 0, release=__version__))
    assert worker.channel.receive() == Ready()


def descriptors(pid: int | str) -> int:
    gc.collect()  # sockets of tests before this one
    return len(os.listdir(f"/proc/{pid}/fd"))


def host_of(hosts: Hosts, engine: KeptWorkers, **limits: float) -> Host:
    host = hosts(WorkerLimits(backoff_s=0.01, **limits))  # type: ignore[arg-type]
    host.executor.starter = engine
    return host


def test_the_next_engine_takes_a_worker_over_and_nothing_is_left_of_this_one(
    keeping: Keeping, hosts: Hosts, tmp_path: Path
) -> None:
    engine = keeping.engine()
    worker = engine.start("a", 0)
    opened(worker, tmp_path)
    lane, lanes_end = Channel.pair()
    inputs, outputs = SharedBuffer.create("in"), SharedBuffer.create("out")
    before = descriptors(worker.pid)
    worker.channel.send_with(AddLane(CORE.cores), [lanes_end.fileno(), inputs.descriptor, outputs.descriptor])
    lanes_end.close()
    lane.send(Run(7, 7, Work("a", 0, 1, 0, 1), False, inputs.write({"x": [X["x"]]})))
    assert isinstance(worker.channel.receive(), Ended)  # the worker keeps what its second unit needs
    lane.send(Run(8, 8, Work("a", 0, 1, 0, 1), False, inputs.write({"x": [X["x"]]})))
    pid = worker.pid
    die(engine, worker)
    for each in (lane, inputs, outputs):
        each.close()

    host = host_of(hosts, keeping.engine())
    host.load("a", lambda: scaled(2.0))
    assert host.pid("a") == pid
    assert descriptors(pid) == before
    assert host.wait(host.start("a", 7, X)) == [None]
    np.testing.assert_allclose(host.executor.take(7)["y"], Y, rtol=1e-5)
    os.kill(pid, signal.SIGKILL)  # the keeper tells how it has ended, and starts another one
    host.wait_resumed()
    assert host.executor.workers()[0].restarts == {"died": 1}
    assert "the worker of 'a' was killed by signal 9" in host.logs
    assert host.wait(host.start("a", 8, X)) == [None]
    host.executor.take(8)


def test_a_worker_that_does_not_answer_is_replaced(keeping: Keeping, hosts: Hosts, tmp_path: Path) -> None:
    engine = keeping.engine()
    worker = engine.start("a", 0)
    opened(worker, tmp_path)
    os.kill(worker.pid, signal.SIGSTOP)
    old = worker.pid
    die(engine, worker)
    host = host_of(hosts, keeping.engine(), hang_floor_s=0.2)
    host.load("a", lambda: scaled(2.0))
    gone(old)
    assert host.pid("a") != old
    assert host.wait(host.start("a", 1, X)) == [None]
    host.executor.take(1)
    assert host.executor.workers()[0].restarts == {}


def test_a_worker_with_other_content_or_without_a_model_is_replaced(
    keeping: Keeping, hosts: Hosts, tmp_path: Path
) -> None:
    engine = keeping.engine()
    other, empty = engine.start("a", 0), engine.start("b", 0)
    opened(other, tmp_path)
    pids = other.pid, empty.pid
    die(engine, other, empty)
    host = host_of(hosts, keeping.engine())
    for name in ("a", "b"):
        host.load(name, lambda: scaled(3.0))
        assert host.pid(name) not in pids
        assert host.wait(host.start(name, 1, X)) == [None]
        np.testing.assert_allclose(host.executor.take(1)["y"], 1.5 * Y, rtol=1e-5)
        host.ends.clear()
    for each in pids:
        gone(each)


def test_workers_that_no_model_needs_are_ended(keeping: Keeping, tmp_path: Path) -> None:
    engine = keeping.engine()
    workers = [engine.start(name, 0) for name in ("a", "a", "b")]
    pids = [each.pid for each in workers]
    die(engine, *workers)
    following = keeping.engine()
    taken = following.adopt("b")
    assert taken is not None
    assert taken.pid == pids[2]
    assert following.adopt("c") is None
    following.release()
    for each in pids[:2]:
        gone(each)
    taken.kill()
    assert taken.wait() in ("was killed by signal 9", "ended by itself with status 0")  # it had no model to open
    assert taken.resident_bytes() == 0
    taken.close()


def test_workers_that_end_without_an_engine_or_are_killed_are_not_offered(keeping: Keeping) -> None:
    first = keeping.engine()
    workers = [first.start(name, 0) for name in ("a", "b")]
    die(first, *workers)
    keeping.call(keeping.keeper.disconnect)
    os.kill(workers[0].pid, signal.SIGKILL)
    gone(workers[0].pid)
    second = keeping.engine()
    while (offer := second.adopt("a")) is not None:  # offered before the keeper knew
        offer.wait()
        offer.close()
    keeping.call(keeping.keeper.kill)
    third = keeping.engine()
    assert (third.adopt("a"), third.adopt("b")) == (None, None)
    gone(workers[1].pid)


def test_engines_that_die_again_and_again_leave_no_descriptor_and_no_process(keeping: Keeping, tmp_path: Path) -> None:
    engine = keeping.engine()
    worker = engine.start("a", 0)
    opened(worker, tmp_path)
    pid, counts = worker.pid, set()
    for _ in range(4):
        die(engine, worker)
        engine = keeping.engine()
        adopted = engine.adopt("a")
        assert adopted is not None
        worker = adopted
        assert worker.pid == pid
        counts.add((descriptors("self"), descriptors(pid), len(keeping.keeper._workers)))
    assert len(counts) == 1
    worker.kill()
    assert worker.wait() == "was killed by signal 9"
    worker.close()
    assert keeping.keeper._workers == []


def test_a_worker_that_cannot_be_started_is_an_error_of_the_system(
    keeping: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EAGAIN, "no process is left")

    engine = keeping.engine()
    before = descriptors("self")
    with monkeypatch.context() as patch:
        patch.setattr(worker_keeper, "ChildProcess", fail)
        with pytest.raises(OSError, match="Resource temporarily unavailable"):
            engine.start("a", 0)
    keeping.call(lambda: None)  # the keeper has closed its copies
    assert descriptors("self") == before
    worker = engine.start("a", 0)
    worker.kill()
    worker.wait()
    worker.close()


def test_a_worker_answers_with_the_sessions_that_it_has_now(keeping: Keeping, tmp_path: Path) -> None:
    worker = keeping.engine().start("a", 0)
    opened(worker, tmp_path)
    both = (0, 1)
    worker.channel.send(Prepare(((both, ((0, 2),)),), {"x": (1, 8)}))
    worker.channel.send(Reset(1))  # waits until they are there
    assert worker.channel.receive() == SessionsPrepared()
    answer = worker.channel.receive()
    assert isinstance(answer, WasReset)
    assert answer.model.sessions == (*SESSIONS, (both, ((0, 2),)))
    worker.channel.send(Keep((both,)))
    worker.channel.send(Reset(2))
    assert worker.channel.receive() == WasReset(2, replace(answer.model, sessions=((both, ((0, 2),)),)))
    worker.channel.shut()
    assert worker.wait() == "ended by itself with status 0"
    worker.close()
