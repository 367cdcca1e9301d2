"""What a supervisor and a worker say to each other, in orders that real workers seldom keep: a script is the worker."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from cotenant.core.actions import Launch
from cotenant.core.events import Event, TenantResumed, TenantSuspended
from cotenant.execute.batches import Batches, BatchTensors
from cotenant.execute.errors import ModelError
from cotenant.execute.protocol import Tensors, Timing
from cotenant.execute.sessions import SessionSet, Wanted
from cotenant.execute.worker import supervisor as module
from cotenant.execute.worker.channel import (
    MOST_MESSAGE_BYTES,
    AddLane,
    Channel,
    Ended,
    FromWorker,
    Keep,
    Message,
    MessageError,
    Open,
    Prepare,
    Ready,
    Refused,
    ReleaseBatch,
    Run,
    SessionsPrepared,
    Started,
    WasReset,
)
from cotenant.execute.worker.lane_link import LaneLink, Pending
from cotenant.execute.worker.limits import WorkerLimits
from cotenant.execute.worker.shared_tensors import TensorLayout
from cotenant.execute.worker.supervisor import WorkerSupervisor
from cotenant.work import Share, Work

WAIT_S = 30.0
FIRST: Wanted = ((1, ((0, 2),)),)
MORE: Wanted = (*FIRST, ((0, 1), ((0, 1), (1, 2))))
NEW: Wanted = (((0, 1), ((0, 1), (1, 2))),)
SHAPES = {"x": (1, 8)}
CORE = Share((0,))
OPEN = Open("a", "/nowhere/a.onnx", "/nowhere/graphs", "folder", FIRST, 0)


def launch(number: int, start: int = 0, end: int = 2, partition: Share = CORE) -> Launch:
    return Launch(number, number, (number,), Work("a", 0, 1, start, end), end == 2, partition, 1)


def tensors(count: int) -> Tensors:
    return {f"x{number}" + "x" * 40: np.ones((1, 1), np.float32) for number in range(count)}


class Script:
    """A worker whose every word the test says. Stands in for `WorkerProcess`."""

    made: queue.SimpleQueue[Script]
    all: ClassVar[list[Script]] = []
    pid = 1

    def __init__(self, *_: object) -> None:
        self.channel, self.end = Channel.pair()
        self.end.wait_at_most(WAIT_S)
        self.held = 0
        self.is_killed = False
        self.all.append(self)
        self.made.put(self)

    def say(self, message: FromWorker) -> None:
        self.end.send(message)

    def hear(self) -> Message:
        message, descriptors = self.end.receive_with()
        for each in descriptors:
            os.close(each)
        assert message is not None
        return message

    def open(self) -> Message:
        self.say(Started())
        return self.hear()

    def cpu_s(self) -> float:
        return 0.0

    def resident_bytes(self) -> int:
        return self.held

    def kill(self) -> None:
        self.is_killed = True
        self.end.shut()

    def wait(self) -> str:
        return "was killed by the test"

    def close(self) -> None:
        self.channel.close()
        self.end.close()


class Stage:
    """A supervisor with scripted workers, and what it told."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        limits = WorkerLimits(backoff_s=0.001, backoff_most_s=0.001, memory_bytes=1000)
        self.batches = Batches()
        self.supervisor = WorkerSupervisor(OPEN, limits, self.batches, self.events.put)

    def next(self) -> Script:
        return Script.made.get(timeout=WAIT_S)

    def load(self) -> Script:
        loading = threading.Thread(target=self.supervisor.load, daemon=True)
        loading.start()
        worker = self.next()
        assert worker.open() == OPEN
        worker.say(Ready())
        loading.join(WAIT_S)
        return worker

    def start(self, each: Launch, inputs: int = 1) -> str | None:
        self.batches.put(each.queries[0], tensors(inputs))
        return self.supervisor.start(each, self.batches.begin(each), self.end)

    def end(self, number: int, error: str | None, _: Timing) -> None:
        self.ends.put((number, error))

    def told(self) -> Event:
        return self.events.get(timeout=WAIT_S)

    def prepare(self) -> Callable[[], str]:
        """Ask for more sessions on another thread; what this gives waits and says how it went."""
        went: queue.SimpleQueue[str] = queue.SimpleQueue()

        def ask() -> None:
            try:
                self.supervisor.prepare(MORE, SHAPES)
                went.put("")
            except ModelError as error:
                went.put(error.reason)

        threading.Thread(target=ask, daemon=True).start()
        return lambda: went.get(timeout=WAIT_S)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    Script.made, Script.all = queue.SimpleQueue(), []
    monkeypatch.setattr(module, "WorkerProcess", Script)
    made = Stage()
    yield made
    made.supervisor.close()
    for worker in Script.all:  # none of them ends by itself, and the supervisor would give it ten seconds
        worker.kill()
    made.supervisor.join()


def test_a_lost_worker_is_dead_before_the_core_is_told(stage: Stage) -> None:
    """What holds too much memory holds it no longer than has to be, however long observers take."""
    worker = stage.load()
    killed_first: list[bool] = []

    def tell(event: Event) -> None:
        killed_first.append(worker.is_killed)
        stage.events.put(event)

    stage.supervisor._on_event = tell
    worker.held = 2000
    worker.say(SessionsPrepared())
    assert isinstance(stage.told(), TenantSuspended)
    assert killed_first == [True]


def test_a_worker_that_starts_while_it_is_closed_is_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits until it has loaded a model that it will not run."""

    def start(*_: object) -> Script:
        stage.supervisor.close()
        return Script()

    worker = stage.load()
    monkeypatch.setattr(module, "WorkerProcess", start)
    worker.kill()
    stage.supervisor._thread.join(WAIT_S)
    assert not stage.supervisor.is_alive
    assert stage.next().is_killed


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_sessions_that_are_asked_for_while_a_worker_opens_are_there_when_it_is_up(stage: Stage) -> None:
    stage.load().kill()
    assert isinstance(stage.told(), TenantSuspended)
    worker = stage.next()
    assert worker.open() == OPEN
    stage.supervisor.prepare(MORE, SHAPES)  # which is not kept waiting
    worker.say(Ready())
    assert worker.hear() == Prepare(NEW, SHAPES)
    assert stage.events.empty()
    assert stage.start(launch(1)) is not None
    worker.say(SessionsPrepared())
    assert stage.told() == TenantResumed("a")
    worker.kill()
    assert isinstance(stage.told(), TenantSuspended)
    opened = stage.next().open()
    assert isinstance(opened, Open)
    assert opened.sessions == MORE


def test_sessions_that_a_worker_opens_with_are_not_sent_again(stage: Stage) -> None:
    worker = stage.load()
    done = stage.prepare()
    assert worker.hear() == Prepare(NEW, SHAPES)
    worker.say(SessionsPrepared())
    assert done() == ""
    worker.kill()
    worker = stage.next()
    worker.open()
    worker.say(Ready())
    assert isinstance(stage.told(), TenantSuspended)
    assert stage.told() == TenantResumed("a")


@pytest.mark.parametrize("way", ["refused", "memory", "memory of a worker that opens", "refused when it opens"])
def test_sessions_that_cannot_be_had_are_forgotten(stage: Stage, way: str) -> None:
    """The next worker does not end as the one before."""
    worker = stage.load()
    if "open" in way:
        worker.kill()
        stage.told()
        worker = stage.next()
        worker.open()
        stage.supervisor.prepare(MORE, SHAPES)
        worker.say(Ready())
    else:
        done = stage.prepare()
    assert worker.hear() == Prepare(NEW, SHAPES)
    worker.held = 2000 if "memory" in way else 0
    worker.say(SessionsPrepared("" if "memory" in way else "no such core"))
    if "open" not in way:
        assert ("memory limit" if way == "memory" else "no such core") in done()
    if way != "refused":
        worker = stage.next()
        assert worker.open() == OPEN
        worker.say(Ready())
        while stage.told() != TenantResumed("a"):
            pass
    again = stage.prepare()
    assert worker.hear() == Prepare(NEW, SHAPES)
    worker.say(SessionsPrepared())
    assert again() == ""


def test_a_worker_that_refuses_its_model_is_not_taken_for_one_that_refuses_sessions() -> None:
    sessions = SessionSet(OPEN)
    sessions.prepare(MORE, SHAPES, lambda _: False)
    assert sessions.begin().sessions == MORE
    assert sessions.rest() is None
    sessions.end(Refused("damaged", "").reason)
    assert sessions.model.sessions == MORE


def test_sessions_that_cannot_be_told_are_an_error() -> None:
    sessions = SessionSet(OPEN)
    many: Wanted = tuple((threads, tuple((at, at + 1) for at in range(1000))) for threads in range(1, 100))
    ours, theirs = Channel.pair()

    def send(message: Message) -> bool:
        ours.post(message)
        return True

    with pytest.raises(ModelError, match="too large"):
        sessions.prepare(many, SHAPES, send)
    assert sessions.model == OPEN
    ours.close()
    theirs.close()


# --- messages ---------------------------------------------------------------------------------------------------------


def fill(channel: Channel) -> int:
    """Send until there is no room; how many messages that took."""
    sent = 0
    with suppress(MessageError):
        while True:
            channel.send(ReleaseBatch(sent))
            sent += 1
    return sent


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    made = Channel.pair()
    yield made
    for each in made:
        each.close()


def test_a_message_of_the_largest_size_arrives_and_a_larger_one_is_refused(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    around = len(msgspec.msgpack.encode(SessionsPrepared("x" * MOST_MESSAGE_BYTES))) - MOST_MESSAGE_BYTES
    message = SessionsPrepared("x" * (MOST_MESSAGE_BYTES - around))
    ours.send(message)
    assert theirs.receive() == message
    ours.send_with(message, [])
    assert theirs.receive_with() == (message, [])
    for send in (ours.send, ours.post, lambda each: ours.send_with(each, [])):
        with pytest.raises(MessageError, match=f"too large, expected at most {MOST_MESSAGE_BYTES}"):
            send(SessionsPrepared("x" * (MOST_MESSAGE_BYTES - around + 1)))


def test_no_room_is_not_taken_for_an_end(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    count = fill(ours)
    assert count > 0
    with pytest.raises(MessageError, match="queue is full"):
        ours.send_with(AddLane((0,)), [])
    posted = [ReleaseBatch(count + number) for number in range(3)]
    for each in posted:
        ours.post(each)
    waits = threading.Thread(target=lambda: ours.send(Ready(), waits=True), daemon=True)
    waits.start()
    assert [theirs.receive() for _ in range(count)] == [ReleaseBatch(number) for number in range(count)]
    assert theirs.receive() == Ready()
    waits.join(WAIT_S)
    ours.flush()
    assert [theirs.receive() for _ in posted] == posted
    theirs.close()
    with pytest.raises(OSError, match="pipe"):
        ours.send(Ready())
    ours.post(Ready())
    ours.flush()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("missing", ["room", "descriptors"])
def test_a_lane_that_cannot_be_made_leaves_nothing_behind(
    ends: tuple[Channel, Channel], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "room":
        fill(ends[0])
    else:
        made: list[int] = []

        def create(*arguments: Any) -> int:
            if made:
                raise OSError(24, "Too many open files")
            made.append(memfd_create(*arguments))
            return made[0]

        memfd_create = os.memfd_create
        monkeypatch.setattr("os.memfd_create", create)
    before = descriptors()
    with pytest.raises((MessageError, OSError)):
        LaneLink(ends[0], (0,))
    assert descriptors() == before


def test_a_launch_that_is_too_large_to_tell_ends_alone(stage: Stage) -> None:
    worker = stage.load()
    assert "too many tensors" in str(stage.start(launch(1), inputs=8000))
    assert stage.start(launch(2)) is None
    assert worker.hear() == AddLane((0,))
    assert stage.start(launch(3), inputs=8000) is None  # it waits for its turn
    worker.say(Ended(2, "not run", 0, 0, 0))
    assert stage.ends.get(timeout=WAIT_S) == (2, "not run")
    number, error = stage.ends.get(timeout=WAIT_S)
    assert number == 3
    assert "too many tensors" in str(error)
    assert stage.start(launch(4)) is None
    assert stage.events.empty()


def test_what_a_worker_keeps_of_a_batch_goes_when_the_rest_of_it_cannot_be_sent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = stage.load()
    assert stage.start(launch(1, 0, 1)) is None
    assert worker.hear() == AddLane((0,))
    worker.say(Ended(1, None, 0, 0, 0))
    assert stage.ends.get(timeout=WAIT_S) == (1, None)

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(module, "LaneLink", fail)
    assert "Too many open files" in str(stage.start(launch(1, 1, 2, Share((1,)))))
    assert worker.hear() == ReleaseBatch(1)
    stage.batches.discard(1)
    assert len(stage.batches) == 0


def test_what_finds_no_room_is_told_later(stage: Stage) -> None:
    """A worker that does not listen for a while loses no word: what it keeps of batches goes."""
    worker = stage.load()
    sessions: Wanted = tuple((threads, ((0, 2),)) for threads in range(1, 20_000))
    told = Keep(tuple(threads for threads, _ in sessions))
    for _ in range(10):
        stage.supervisor.keep(sessions)
    assert [worker.hear() for _ in range(3)] == [told] * 3
    for _ in range(7):
        worker.say(Ended(77, None, 0, 0, 0))  # whatever it says, the supervisor looks whether there is room
        assert worker.hear() == told


def test_lengths_of_layouts_are_what_a_launch_is_bounded_by(ends: tuple[Channel, Channel]) -> None:
    """And not the tensors: the largest number of inputs of a usual name passes whole."""
    ours, theirs = ends
    layouts = tuple(
        TensorLayout(f"input_{number}", "<f4", (1, 3, 224, 224), number * 64, 602112) for number in range(4000)
    )
    run = Run(1, 1, Work("a", 0, 1, 0, 2), True, layouts)
    ours.send(run)
    assert theirs.receive() == run


def test_a_pending_launch_that_was_refused_leaves_its_lane_free(ends: tuple[Channel, Channel]) -> None:
    link = LaneLink(ends[0], (0,))
    with pytest.raises(MessageError, match="too large"):
        link.put(Pending(launch(1), lambda *_: None, BatchTensors(launch(1), [tensors(8000)])))
    after = Pending(launch(2), lambda *_: None, BatchTensors(launch(2), [tensors(1)]))
    link.put(after)
    assert after.is_sent
    link.close()


# --- workers of an engine before this one -----------------------------------------------------------------------------


class Left(Script):
    """A worker that an engine before this one left behind."""

    token = 7
    reset_s = 0.0


class Starter:
    """Offers workers in turn, and starts others."""

    def __init__(self, *left: Left) -> None:
        self.left = list(left)

    def adopt(self, tenant: str) -> Left | None:
        assert tenant == OPEN.tenant
        return self.left.pop(0) if self.left else None

    def start(self, *_: object) -> Script:
        return Script()


def test_a_worker_is_taken_over_once_it_is_reset(stage: Stage) -> None:
    """Messages for the engine before it come first, and are dropped."""
    worker = Left()
    stage.supervisor._starter = Starter(worker)
    worker.say(Ready())
    worker.say(Ended(1, None, 0, 0, 0))
    worker.say(SessionsPrepared("no memory"))
    worker.say(WasReset(6, OPEN))  # for an engine that died at once
    worker.say(Ended(2, "gone", 0, 0, 0))
    worker.say(WasReset(7, replace(OPEN, sessions=MORE)))
    stage.supervisor.load()
    assert worker.hear() == Keep((1,))
    assert stage.start(launch(1)) is None
    assert isinstance(worker.hear(), AddLane)
    worker.say(Ended(1, "it fails", 0, 0, 0))
    assert stage.ends.get(timeout=WAIT_S) == (1, "it fails")
    worker.kill()
    assert isinstance(stage.told(), TenantSuspended)
    assert stage.next() is worker
    assert stage.next().open() == OPEN  # the next one is new


@pytest.mark.parametrize(
    "model",
    [
        replace(OPEN, graph="other"),
        replace(OPEN, max_answer_bytes=1),
        replace(OPEN, release="0.0"),
        replace(OPEN, sessions=((1, ((0, 1),)),)),
        None,
    ],
)
def test_a_worker_of_another_model_is_ended_and_the_next_one_is_looked_at(stage: Stage, model: Open | None) -> None:
    wrong, right = Left(), Left()
    stage.supervisor._starter = Starter(wrong, right)
    if model is None:
        wrong.end.shut()  # it has ended
    else:
        wrong.say(WasReset(7, model))
    right.say(WasReset(7, OPEN))
    stage.supervisor.load()
    assert wrong.is_killed
    assert not right.is_killed
    assert stage.supervisor.status.restarts == {}


def test_a_worker_that_does_not_end_its_launches_is_replaced(stage: Stage) -> None:
    worker = Left()
    stage.supervisor._starter = Starter(worker)
    stage.supervisor._limits = WorkerLimits(hang_floor_s=0.01)
    worker.say(Ended(1, None, 0, 0, 0))
    loading = threading.Thread(target=stage.supervisor.load, daemon=True)
    loading.start()
    assert stage.next() is worker
    fresh = stage.next()
    assert worker.is_killed
    assert fresh.open() == OPEN
    fresh.say(Ready())
    loading.join(WAIT_S)
    assert stage.supervisor.problem == ""
