"""The executor for streams, on a device that is faked: what the conformance suite cannot ask of a CPU."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotenant.core.actions import Launch, Respond
from cotenant.execute.errors import ModelError
from cotenant.execute.gpu.chains import Chains, SegmentChain, capture_chain, form_of
from cotenant.execute.gpu.streams import CpuStreams, Named, Replay
from cotenant.execute.protocol import LoadSpec, Timing
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.serve.engine.clock import RealClock
from cotenant.serve.engine.driver import Driver
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work
from fake_streams import GPU, WAIT_S, FakeLane, FakeModel, FakeStreams, LostError
from strict_engine import StrictEngine as Engine

LEFT = Share((0, 1), GPU)
RIGHT = Share((2, 3), GPU)
SPEC = LoadSpec((LEFT, RIGHT), (0, 2, 4), ({"x": (1, 3)},), max_batch=4)
CHAINS = 2 * 3
"""Two shares, and 1, 2 and 4 rows."""


class World:
    """An executor on a fake device, with what its launches ended in."""

    def __init__(self, device: FakeStreams) -> None:
        self.device = device
        self.executor = TorchExecutor(device)
        self.ends: dict[int, tuple[str | None, Timing]] = {}
        self.order: list[int] = []
        self.waiting: dict[int, Launch] = {}
        self._changed = threading.Condition()
        self._numbers = itertools.count()

    def serve(self, tenant: str, spec: LoadSpec = SPEC, *, weight_bytes: int = 100, values: bool = False) -> FakeModel:
        model = FakeModel(tenant, self.device, weight_bytes)
        model.waits_for_values = values
        self.executor.add_model(tenant, self.executor.load(tenant, model, spec))
        return model

    def start(
        self,
        tenant: str,
        query: int,
        span: tuple[int, int] = (0, 4),
        partition: Share = LEFT,
        rows: int = 1,
        batch: int | None = None,
        after: tuple[int, ...] = (),
    ) -> int:
        number = next(self._numbers)
        if span[0] == 0:
            self.executor.put(query, {"x": values(query, rows)})
        batch = query if batch is None else batch
        launch = Launch(number, batch, (query,), Work(tenant, 0, rows, *span), span[1] == 4, partition, 1, after=after)
        if after:
            self.executor.enqueue(launch)
            self.waiting[number] = launch
        else:
            self.executor.start(launch, self.ended)
        return number

    def wake(self, number: int) -> None:
        self.executor.start(self.waiting.pop(number), self.ended)

    def run(self, *args: Any, **options: Any) -> str | None:
        return self.wait(self.start(*args, **options))

    def ended(self, launch: int, error: str | None, timing: Timing) -> None:
        with self._changed:
            assert launch not in self.ends
            self.ends[launch] = error, timing
            self.order.append(launch)
            self._changed.notify_all()

    def wait(self, launch: int) -> str | None:
        with self._changed:
            assert self._changed.wait_for(lambda: launch in self.ends, WAIT_S)
            return self.ends[launch][0]

    def answer(self, query: int) -> Any:
        return self.executor.take(query)["y"]


def values(query: int, rows: int = 1) -> Any:
    return np.full((rows, 3), query + 1, np.float32)


def expected(query: int, rows: int = 1) -> Any:
    return FakeModel("reference").expected(values(query, rows))["y"]


@pytest.fixture
def device() -> FakeStreams:
    return FakeStreams()


@pytest.fixture
def world(device: FakeStreams) -> Iterator[World]:
    made = World(device)
    yield made
    device.gate.set()
    made.executor.close()
    assert device.is_closed


# --- order and waiting ---------------------------------------------------------------------------------------------


def test_nothing_ends_before_its_event_and_one_thread_looks(world: World, device: FakeStreams) -> None:
    model = world.serve("a", values=True)
    device.gate.clear()
    ran = threading.Semaphore(0)
    model.before_run = ran.release
    numbers = [world.start("a", query) for query in range(3)]
    for _ in numbers:
        assert ran.acquire(timeout=WAIT_S)  # all three are on the device ...
    assert world.ends == {}  # ... and none has ended
    device.gate.set()
    assert [world.wait(number) for number in numbers] == [None] * 3
    assert world.order == numbers
    for query in range(3):
        np.testing.assert_array_equal(world.answer(query), expected(query))
    assert any(name.startswith("cotenant-ends") for name in device.lookers)


def test_a_launch_that_fails_ends_after_those_before_it(world: World, device: FakeStreams) -> None:
    world.serve("a")
    device.gate.clear()
    first = world.start("a", 0)
    world.executor.put(1, {"wrong": values(1)})
    second = world.start("nobody", 1)
    device.gate.set()
    assert world.wait(second) == "the model of tenant 'nobody' is not loaded any more"
    assert world.order == [first, second]


def test_times_come_from_events(world: World) -> None:
    world.serve("a")
    number = world.start("a", 0)
    assert world.wait(number) is None
    timing = world.ends[number][1]
    assert timing.infer_ns == 7
    assert timing.input_ns > 7  # the copy, and gathering on the host
    assert timing.output_ns > 7


def test_tensors_of_a_launch_go_when_it_has_ended_and_not_before(world: World, device: FakeStreams) -> None:
    """The memory is of another stream: it must not be used again while this one reads."""
    model = world.serve("a", values=True)
    seen: list[weakref.ref[torch.Tensor]] = []
    ran = threading.Semaphore(0)
    run = model.run

    def spy(start: int, end: int, tensors: Any, threads: Any = 1) -> Any:
        try:
            seen.append(weakref.ref(tensors["x"]))
            return run(start, end, tensors, threads)
        finally:
            ran.release()

    model.run = spy  # type: ignore[method-assign]
    assert world.run("a", 0, (0, 2)) is None
    assert ran.acquire(timeout=WAIT_S)
    device.gate.clear()
    last = world.start("a", 0, (2, 4), RIGHT)
    world.executor.release(0)
    assert ran.acquire(timeout=WAIT_S)
    assert seen[1]() is not None
    device.gate.set()
    assert world.wait(last) is None
    assert [each() for each in seen] == [None, None]


CORES = tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.skipif(len(CORES) < 2, reason="one core only")
def test_lanes_of_a_cpu_compute_on_their_first_core_and_tell_of_it_there() -> None:
    executor = TorchExecutor(CpuStreams())
    model = FakeModel("a")
    executor.add_model("a", executor.load("a", model, SPEC))
    threads: list[tuple[str, set[int]]] = []
    model.before_run = lambda: threads.append((threading.current_thread().name, os.sched_getaffinity(0)))
    ended = threading.Semaphore(0)

    def end(_: int, error: str | None, __: Timing) -> None:
        assert error is None
        assert threading.current_thread().name == threads[-1][0], "nobody needs to be woken"
        ended.release()

    for query, partition in enumerate((Share(CORES[-1:]), Share(CORES[:2]))):
        executor.put(query, {"x": values(query)})
        executor.start(Launch(query, query, (query,), Work("a", 0, 1, 0, 4), True, partition, 1), end)
        assert ended.acquire(timeout=WAIT_S)
    executor.close()
    assert [cores for _, cores in threads] == [{CORES[-1]}, {CORES[0]}]


def test_only_some_launches_are_timed(world: World, device: FakeStreams) -> None:
    device.timed_every = 2
    world.serve("a")
    numbers = [world.start("a", query) for query in range(4)]
    assert [world.wait(number) for number in numbers] == [None] * 4
    assert [world.ends[number][1].infer_ns == 7 for number in numbers] == [False, True, False, True]
    assert all(world.ends[number][1].infer_ns > 0 for number in numbers)


# --- launches that wait for others ---------------------------------------------------------------------------------


def test_a_launch_that_waits_is_on_the_device_before_it_is_started(world: World, device: FakeStreams) -> None:
    model = world.serve("a", values=True)
    runs = threading.Semaphore(0)
    model.before_run = runs.release
    device.gate.clear()
    first = world.start("a", 0)
    second = world.start("a", 1, partition=RIGHT, after=(first,))
    assert runs.acquire(timeout=WAIT_S)
    assert runs.acquire(timeout=WAIT_S)  # nobody has told that the first has ended
    assert device.followed == [(RIGHT, LEFT)]
    device.gate.set()
    assert world.wait(first) is None
    assert second not in world.ends, "it ends when it has started"
    world.wake(second)
    assert world.wait(second) is None
    assert model.runs == 2
    for query in range(2):
        np.testing.assert_array_equal(world.answer(query), expected(query))


def test_a_launch_that_is_not_wanted_any_more_ends_for_nobody(world: World, device: FakeStreams) -> None:
    world.serve("a")
    device.gate.clear()
    first = world.start("a", 0)
    second = world.start("a", 1, partition=RIGHT, after=(first,))
    world.executor.release(1)
    world.executor.discard(1)
    device.gate.set()
    assert world.wait(first) is None
    assert world.run("a", 2, partition=RIGHT) is None  # behind it on its lane
    assert second not in world.ends
    for query in (0, 2):
        np.testing.assert_array_equal(world.answer(query), expected(query))
    assert world.executor.kept == 0


def test_a_launch_that_waits_for_one_that_has_ended_or_failed_runs(world: World) -> None:
    world.serve("a")
    first = world.start("nobody", 0)
    assert world.wait(first) is not None
    second = world.start("a", 1, after=(first,))
    world.wake(second)
    assert world.wait(second) is None
    np.testing.assert_array_equal(world.answer(1), expected(1))


# --- batches in parts ------------------------------------------------------------------------------------------------


class Tasks:
    """One batch in parts, each of which is submitted behind those that it waits for."""

    def __init__(self, world: World, rows: int, query: int = 0) -> None:
        self.world = world
        self.rows = rows
        self.query = query
        self.ids: list[int] = []
        world.executor.put(query, {"x": np.arange(3 * rows, dtype=np.float32).reshape(rows, 3) + query})

    def launch(
        self,
        span: tuple[int, int],
        share: Share,
        after: tuple[int, ...] = (),
        rows: tuple[int, ...] = (),
        *,
        part: bool = True,
        end: int = 4,
    ) -> int:
        number = next(self.world._numbers)
        work = Work("a", 0, rows[1] - rows[0] if rows else self.rows, *span, rows=rows)
        launch = Launch(number, self.query, (self.query,), work, span[1] == end, share, 1, part=part, after=after)
        if after:
            self.world.executor.enqueue(launch)
            self.world.waiting[number] = launch
        else:
            self.world.executor.start(launch, self.world.ended)
        self.ids.append(number)
        return number

    def expected(self) -> Any:
        x = np.arange(3 * self.rows, dtype=np.float32).reshape(self.rows, 3) + self.query
        return FakeModel("reference").expected(x)["y"]


CUTS = LoadSpec((LEFT, RIGHT), (0, 1, 3, 4), ({"x": (1, 3)},), max_batch=4)


@pytest.mark.parametrize(("rows", "is_captured"), [(2, True), (3, False), (4, True), (3, True)])
def test_chunks_of_a_run_are_on_the_device_behind_what_they_wait_for(
    world: World, device: FakeStreams, rows: int, is_captured: bool
) -> None:
    """A batch of three rows is padded to four where it is captured: chunks have none of the padding."""
    model = world.serve("a", CUTS, values=not is_captured)
    runs = threading.Semaphore(0)
    model.before_run = runs.release
    device.gate.clear()
    tasks = Tasks(world, rows)
    first = tasks.launch((0, 1), LEFT)
    chunks = [
        tasks.launch((1, 3), share, (first,), part)
        for share, part in ((LEFT, (0, rows // 2)), (RIGHT, (rows // 2, rows)))
    ]
    last = tasks.launch((3, 4), RIGHT, tuple(chunks))
    if not is_captured:
        for _ in range(4):
            assert runs.acquire(timeout=WAIT_S)  # all of it is on the device, and nothing has ended
        assert device.followed == [(LEFT, LEFT), (RIGHT, LEFT), (RIGHT, LEFT), (RIGHT, RIGHT)]
    device.gate.set()
    assert world.wait(first) is None
    for number in (*chunks, last):
        world.wake(number)
        assert world.wait(number) is None
    np.testing.assert_array_equal(world.answer(0), tasks.expected())
    assert world.executor.kept == 0


def test_chunks_to_the_end_of_a_model_give_each_row_its_answer(world: World, device: FakeStreams) -> None:
    world.serve("a", CUTS)
    for query, shares in ((0, (LEFT, RIGHT)), (1, (RIGHT, LEFT))):
        tasks = Tasks(world, 3, query)
        numbers = [tasks.launch((0, 4), share, (), part) for share, part in zip(shares, ((0, 1), (1, 3)), strict=True)]
        assert [world.wait(number) for number in numbers] == [None, None]
        np.testing.assert_array_equal(world.answer(query), tasks.expected())
    assert world.executor.kept == 0


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_batch_that_paused_goes_on_in_chunks_and_whole_again(
    world: World, device: FakeStreams, is_captured: bool
) -> None:
    world.serve("a", CUTS, values=not is_captured)
    tasks = Tasks(world, 3)
    assert world.wait(tasks.launch((0, 1), LEFT, part=False)) is None
    for number in [tasks.launch((1, 3), share, (), part) for share, part in ((LEFT, (0, 2)), (RIGHT, (2, 3)))]:
        assert world.wait(number) is None
    assert world.wait(tasks.launch((3, 4), RIGHT, part=False)) is None
    np.testing.assert_array_equal(world.answer(0), tasks.expected())


def test_a_chunk_reads_nothing_that_the_device_has_not_put_before_it(world: World, device: FakeStreams) -> None:
    """A policy that forgot to say what a launch waits for gets an error, not tensors that are half written."""
    model = world.serve("a", CUTS, values=True)
    runs = threading.Semaphore(0)
    model.before_run = runs.release
    device.gate.clear()
    tasks = Tasks(world, 2)
    first = tasks.launch((0, 1), LEFT)
    assert runs.acquire(timeout=WAIT_S)
    stray = tasks.launch((1, 3), RIGHT, (), (0, 1))
    assert runs.acquire(timeout=WAIT_S)
    device.gate.set()
    assert world.wait(first) is None
    assert world.wait(stray) is not None
    world.executor.release(0)
    world.executor.discard(0)
    assert world.executor.kept == 0


def test_what_a_chunk_reads_is_known_through_those_between(world: World, device: FakeStreams) -> None:
    """The third waits for the second, which waits for the first, whose tensors it reads."""
    model = world.serve("a", CUTS, values=True)
    runs = threading.Semaphore(0)
    model.before_run = runs.release
    device.gate.clear()
    tasks = Tasks(world, 2)
    first = tasks.launch((0, 1), LEFT)
    second = tasks.launch((1, 3), LEFT, (first,), (0, 1))
    third = tasks.launch((1, 3), RIGHT, (second,), (1, 2))
    last = tasks.launch((3, 4), LEFT, (third,))
    for _ in range(4):
        assert runs.acquire(timeout=WAIT_S)
    device.gate.set()
    assert world.wait(first) is None
    for number in (second, third, last):
        world.wake(number)
        assert world.wait(number) is None
    np.testing.assert_array_equal(world.answer(0), tasks.expected())


def test_chunks_that_nobody_wants_any_more_leave_nothing(world: World, device: FakeStreams) -> None:
    world.serve("a", CUTS)
    device.gate.clear()
    tasks = Tasks(world, 2)
    first = tasks.launch((0, 1), LEFT)
    tasks.launch((1, 3), LEFT, (first,), (0, 1))
    tasks.launch((1, 3), RIGHT, (first,), (1, 2))
    world.executor.release(0)
    world.executor.discard(0)
    device.gate.set()
    assert world.wait(first) is None
    assert world.run("a", 2, (0, 1), partition=RIGHT) is None
    assert world.executor.kept == 2, "the second batch alone, which has paused"


# --- chains --------------------------------------------------------------------------------------------------------


def test_all_is_captured_and_run_twice_at_loading_and_nothing_later(world: World, device: FakeStreams) -> None:
    model = world.serve("a")
    assert len(world.executor.chains) == CHAINS
    assert len(device.captures) == 2 * CHAINS  # of two segments
    assert device.replays == 2 * 2 * CHAINS
    runs = model.runs
    assert runs == 2 * 2 * CHAINS
    for query, (rows, share) in enumerate(itertools.product((1, 2, 3, 4), (LEFT, RIGHT))):
        assert world.run("a", query, rows=rows, partition=share) is None
        np.testing.assert_array_equal(world.answer(query), expected(query, rows))
    assert len(device.captures) == 2 * CHAINS
    assert world.executor.chains.eager == 0
    assert model.runs == runs


def test_rows_that_nobody_asked_for_have_values() -> None:
    held = torch.full((4, 3), 1 << 40)
    chain = SegmentChain(4, (0, 1), [{"ids": held}, {}], [lambda: None])
    chain.fill(0, {"ids": torch.ones((3, 3), dtype=torch.int64)})
    assert held.tolist() == [[1] * 3] * 3 + [[0] * 3]


def test_a_chain_holds_no_memory(device: FakeStreams) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    class Lane(FakeLane):
        def capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
            outputs = {name: value.clone() for name, value in work().items()}
            made.extend(map(weakref.ref, outputs.values()))
            return lambda: None, outputs

        def unowned(self, tensors: Named) -> Named:
            return {name: torch.empty_like(value) for name, value in tensors.items()}

    inputs = {"x": torch.ones(2, 3)}
    chain = capture_chain(Lane(device, LEFT), FakeModel("a").run, (0, 2, 4), inputs, 2)
    assert chain.has(0, 4)
    assert [each() for each in made] == [None] * 3


def test_graphs_of_a_share_go_with_the_last_chain_there() -> None:
    chains, form = Chains(), form_of({"x": torch.ones(1, 3)}, 1, 4)
    for model, share in ((1, LEFT), (2, LEFT), (1, RIGHT)):
        chains.add(model, share, form, SegmentChain(1, (0, 1), [{}, {}], [lambda: None]))
    of_another_type = form_of({"x": torch.ones(1, 3, dtype=torch.float64)}, 1, 4)
    assert chains.find(1, LEFT, of_another_type, 0, 1) is None
    left, right = (weakref.ref(chains.find(1, share, form, 0, 1)) for share in (LEFT, RIGHT))
    chains.drop(1)
    assert len(chains) == 1
    assert right() is None
    assert left() is not None
    chains.drop(2)
    assert left() is None


def test_a_paused_batch_outlives_others_and_goes_on_where_it_pleases(world: World, device: FakeStreams) -> None:
    world.serve("a")
    for query in range(4):
        assert world.run("a", query, (0, 2), rows=3) is None
    for query, share in ((2, LEFT), (0, RIGHT), (3, LEFT), (1, RIGHT)):
        assert world.run("a", query, (2, 4), share, rows=3) is None
    for query in range(4):
        np.testing.assert_array_equal(world.answer(query), expected(query, 3))
    assert world.executor.kept == 0
    assert world.executor.chains.eager == 0


def test_what_was_not_prepared_runs_eagerly_and_right(world: World, device: FakeStreams) -> None:
    world.serve("a")
    captured = len(device.captures)
    elsewhere = Share((4,), GPU)
    assert world.run("a", 0, rows=5) is None
    assert world.run("a", 1, partition=elsewhere) is None
    assert world.run("a", 2, (0, 1)) is None
    assert world.run("a", 2, (1, 4)) is None
    assert world.run("a", 3, (0, 2), rows=3) is None  # in four rows, which it keeps
    assert world.run("a", 3, (2, 4), elsewhere, rows=3) is None
    assert world.run("a", 4, (0, 2), elsewhere, rows=3) is None  # in three, which no chain has
    assert world.run("a", 4, (2, 4), rows=3) is None
    for query, rows in enumerate((5, 1, 1, 3, 3)):
        np.testing.assert_array_equal(world.answer(query), expected(query, rows))
    assert world.executor.chains.eager == 7
    assert len(device.captures) == captured


def test_a_model_that_takes_no_batches_has_one_chain_a_shape(world: World, device: FakeStreams) -> None:
    world.serve("a", replace(SPEC, max_batch=1, shapes=({"x": (2, 3)}, {"x": (1, 3)})))
    assert len(world.executor.chains) == 4
    for query, rows in enumerate((1, 2)):
        assert world.run("a", query, rows=rows) is None
        np.testing.assert_array_equal(world.answer(query), expected(query, rows))
    assert world.executor.chains.eager == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), "1 rows: operation not permitted"),
        (None, "operator 'nms' needs values on the host"),
    ],
)
def test_what_cannot_be_captured_is_said_and_runs_eagerly(
    world: World, device: FakeStreams, caplog: pytest.LogCaptureFixture, error: Exception | None, text: str
) -> None:
    device.refuses_capture = error
    with caplog.at_level("INFO", "cotenant.torch"):
        world.serve("a", values=error is None)
    device.refuses_capture = None
    assert f"the rest runs eagerly: {text}" in caplog.text
    assert world.run("a", 0) is None
    np.testing.assert_array_equal(world.answer(0), expected(0))
    assert device.captures == []


@pytest.mark.parametrize("refused", [{2}, {1, 2}, {4}, {3, 4}, {1, 2, 3, 4}])
def test_batches_of_a_chain_that_is_refused_are_padded_to_a_larger_one(
    world: World, device: FakeStreams, caplog: pytest.LogCaptureFixture, refused: set[int]
) -> None:
    device.refused_rows = refused
    world.serve("a")
    assert "CUDA refused" in caplog.text
    assert "SMs 1 rows: CUDA error" in caplog.text or 1 not in refused
    for query, (rows, share) in enumerate(itertools.product((1, 2, 3, 4), (LEFT, RIGHT))):
        assert world.run("a", query, rows=rows, partition=share) is None
        np.testing.assert_array_equal(world.answer(query), expected(query, rows))
    assert world.executor.chains.eager == 0


def test_what_warming_up_leaves_is_given_back_before_a_capture(device: FakeStreams) -> None:
    device.memory_bytes, device.graph_bytes = 10_000, 10
    world = World(device)
    model = FakeModel("a", device)

    def keep_some() -> None:
        device.cached_bytes += device.free_bytes

    model.before_run = keep_some
    world.executor.load("a", model, SPEC)
    assert len(world.executor.chains) == CHAINS
    world.executor.close()


def test_graphs_leave_memory_for_others(device: FakeStreams, caplog: pytest.LogCaptureFixture) -> None:
    device.memory_bytes, device.graph_bytes = 1000, 100
    world = World(device)
    with caplog.at_level("INFO", "cotenant.torch"):
        world.serve("a")
    assert 100 <= device.free_bytes < 1000
    assert 0 < len(world.executor.chains) < CHAINS
    assert "MiB are free on cuda:0" in caplog.text
    for query, (rows, share) in enumerate(itertools.product((1, 4), (LEFT, RIGHT))):
        assert world.run("a", query, rows=rows, partition=share) is None
        np.testing.assert_array_equal(world.answer(query), expected(query, rows))
    assert world.executor.chains.eager > 0
    world.executor.close()


def test_a_new_model_of_a_tenant_has_chains_of_its_own(world: World, device: FakeStreams) -> None:
    world.serve("a")
    old = world.executor._models["a"]
    new = world.serve("a")
    old.close()
    assert len(world.executor.chains) == CHAINS
    assert world.run("a", 0) is None
    assert not new.is_closed
    assert world.executor.chains.eager == 0


def test_a_launch_without_memory_is_tried_again_and_fails_alone(world: World, device: FakeStreams) -> None:
    model = world.serve("a", values=True)
    fails = iter((True, False, True, True, False))
    left: list[weakref.ref[torch.Tensor]] = []

    def runs_out() -> None:
        assert all(each() is None for each in left), "the first try still holds its tensors"
        if next(fails):
            scratch = torch.empty(4)
            left.append(weakref.ref(scratch))
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.before_run = runs_out
    assert world.run("a", 0) is None
    reason = world.run("a", 1, rows=1 << 16)
    assert reason is not None
    assert reason.startswith("out of memory on cuda:0: no room for units 0 to 4 of 65536 rows (0.8 MiB of tensors)")
    assert world.run("a", 2) is None
    world.executor.discard(1)
    for query in (0, 2):
        np.testing.assert_array_equal(world.answer(query), expected(query))
    assert world.executor.kept == 0


def test_urgent_tenants_have_streams_of_their_own(world: World, device: FakeStreams) -> None:
    world.serve("calm")
    world.serve("urgent", replace(SPEC, urgent=True))
    device.streams.clear()
    for query, tenant in enumerate(("calm", "urgent", "calm")):
        assert world.run(tenant, query) is None
    assert device.streams == [(LEFT, False), (LEFT, True), (LEFT, False)]


def test_a_host_without_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 45)
    wrapped = ModelError(Path("m"), "units 0 to 1 failed", "")
    wrapped.__cause__ = caught.value
    assert CpuStreams().is_out_of_memory(wrapped)
    assert not CpuStreams().is_out_of_memory(RuntimeError("something else"))


def test_answers_are_right_while_models_come_and_go_on_several_lanes() -> None:
    """Batches of all sizes in segments, each on any lane, with chains and without; one model is loaded anew."""
    device = FakeStreams()
    world = World(device)
    tenants = ("a", "b", "c", "d")
    for tenant in tenants:
        world.serve(tenant, replace(SPEC, urgent=tenant == "d", cuts=(0, 1, 3, 4)), values=tenant == "b")
    lanes = (LEFT, RIGHT, Share((4,), GPU))
    plans: list[list[int]] = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        plans.append([int(number) for number in rng.integers(0, 1 << 16, 60)])
    wrong: list[str] = []
    answered: list[int] = []

    def client(number: int) -> None:
        for step, choice in enumerate(plans[number]):
            query, rows, cut = 1000 * number + step, 1 + choice % 5, 1 + choice // 2 % 3
            tenant = tenants[choice // 16 % 4]
            for at, span in enumerate(((0, cut), (cut, 4))):
                reason = world.run(tenant, query, span, lanes[(choice >> at) % 3], rows=rows)
                if reason is not None:
                    wrong.append(reason)
            answered.append(query)
            if not np.array_equal(world.answer(query), expected(query, rows)):
                wrong.append(f"query {query} of {tenant}")

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(len(plans))]
    for thread in threads:
        thread.start()
    world.serve("e")
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert wrong == []
    assert len(answered) == 180
    assert world.executor.kept == 0
    assert min(world.executor.chains.eager, world.executor.chains.replayed) > 60
    world.executor.close()


# --- faults --------------------------------------------------------------------------------------------------------


def test_a_kernel_that_fails_fails_its_launch_and_the_lane_goes_on(world: World, device: FakeStreams) -> None:
    world.serve("a")
    device.fault = RuntimeError("CUDA error: device-side assert triggered")
    assert world.run("a", 0) == "CUDA error: device-side assert triggered"
    device.fault = None
    assert world.executor.problem("a") == ""
    assert world.run("a", 1) is None
    world.executor.discard(0)
    world.answer(1)
    assert world.executor.kept == 0


def test_a_lane_that_cannot_be_had_fails_its_launches_alone(
    world: World, device: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.serve("a")

    def settle(_: FakeLane) -> None:
        raise RuntimeError("it is no share of this device")

    monkeypatch.setattr(FakeLane, "settle", settle)
    assert world.run("a", 0, partition=Share((5,), GPU)) == "it is no share of this device"
    with pytest.raises(RuntimeError, match="no share"):
        world.serve("b", replace(SPEC, shares=(Share((6,), GPU),)))
    assert world.run("a", 1) is None
    world.executor.discard(0)
    np.testing.assert_array_equal(world.answer(1), expected(1))


def test_a_device_that_is_lost_says_so_for_every_tenant(world: World, device: FakeStreams) -> None:
    world.serve("a")
    other = world.serve("b", values=True)
    assert world.run("b", 0, (0, 2)) is None
    device.fault = LostError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    sentence = "cuda:0 is lost (CUDA error: an illegal memory access was encountered): restart the server"
    assert world.run("a", 1) == sentence
    assert world.executor.problem("a") == sentence
    assert world.executor.problem("b") == sentence
    device.fault = None
    assert world.run("b", 0, (2, 4)) == sentence
    assert other.runs == 1  # nothing is submitted to it any more
    for query in (0, 1):
        world.executor.discard(query)
    assert world.executor.kept == 0


def test_a_dtype_that_torch_does_not_have_is_named(world: World) -> None:
    world.serve("a")
    world.executor.put(0, {"x": np.array(["text"], dtype=object)})
    ended = threading.Event()
    reasons: list[str | None] = []

    def end(_: int, error: str | None, __: Timing) -> None:
        reasons.append(error)
        ended.set()

    world.executor.start(Launch(0, 0, (0,), Work("a", 0, 1, 0, 4), True, LEFT, 1), end)
    assert ended.wait(WAIT_S)
    assert reasons == ["input 'x' is object, which torch has no tensors of"]


# --- life of models ------------------------------------------------------------------------------------------------


def test_a_model_is_closed_when_its_launches_have_ended(world: World, device: FakeStreams) -> None:
    model = FakeModel("a", device)
    loaded = world.executor.load("a", model, SPEC)
    world.executor.add_model("a", loaded)
    assert world.run("a", 0, (0, 2)) is None
    device.gate.clear()
    under_way = world.start("a", 0, (2, 4))
    world.executor.remove_model("a")
    loaded.close()
    assert not model.is_closed
    device.gate.set()
    assert world.wait(under_way) is None
    assert model.is_closed
    assert world.run("a", 1) == "the model of tenant 'a' is not loaded any more"


def test_only_torch_models_are_taken(world: World) -> None:
    class OnnxModel:
        path = Path("m/1/model.onnx")

    with pytest.raises(ModelError, match="cuda:0 only runs torch models"):
        world.executor.load("a", OnnxModel(), SPEC)  # type: ignore[arg-type]


def test_a_group_is_on_the_device_behind_the_one_that_runs(device: FakeStreams) -> None:
    """Through the driver, as a server has it: groups of overlap whose barrier is an event of the device."""
    world = World(device)
    tenants = tuple(Tenant(name, 10**12, (0, 2, 4), max_batch=4) for name in ("a", "b"))
    policy = Overlap((LEFT, RIGHT), enqueue_ms=1000)
    for tenant in tenants:
        world.serve(tenant.name, replace(SPEC, shares=policy.spec.shares))
    table = LatencyTable((LatencyRow(0, 1, 2, 10**6), LatencyRow(0, 4, 2, 10**6)), (1.0,) * 4)
    predictor = TablePredictor({tenant.name: table for tenant in tenants})
    clock = RealClock()
    driver = Driver(Engine(tenants, policy, predictor, Machine.holding((LEFT, RIGHT))), world.executor, clock)
    answers: list[tuple[int, Respond, Any]] = []
    answered = threading.Semaphore(0)

    def ask(number: int) -> None:
        tenant = tenants[number % 2]

        def done(respond: Respond, outputs: Any) -> None:
            answers.append((number, respond, outputs))
            answered.release()

        def make(query: int, now: int) -> Query:
            return Query(query, tenant.name, now, now + tenant.slo_ns, items=1 + number % 3)

        driver.submit(make, {"x": values(number, 1 + number % 3)}, done)

    device.gate.clear()
    for number in range(12):
        ask(number)
    device.gate.set()
    for _ in range(12):
        assert answered.acquire(timeout=WAIT_S)
    clock.close()
    world.executor.close()
    assert {respond.outcome for _, respond, _ in answers} == {Outcome.ANSWERED}
    for number, _, outputs in answers:
        np.testing.assert_array_equal(outputs["y"], expected(number, 1 + number % 3))
    assert {LEFT, RIGHT} <= {lane for pair in device.followed for lane in pair}
    assert world.executor.kept == 0
    assert world.executor.chains.eager == 0
