"""The executor for streams, on a device that is faked: what the conformance suite cannot ask of a CPU."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotenant.core.actions import Launch
from cotenant.errors import InvalidValueError
from cotenant.execute.errors import ModelError
from cotenant.execute.gpu.graph_pool import GraphKey, GraphPool
from cotenant.execute.gpu.streams import CpuStreams
from cotenant.execute.protocol import Timing
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.work import Share, Work
from fake_streams import GPU, WAIT_S, FakeModel, FakeStreams, LostError

LEFT = Share((0, 1), GPU)
RIGHT = Share((2, 3), GPU)


class World:
    """An executor on a fake device, with what its launches ended in."""

    def __init__(self, device: FakeStreams, *, graphs: int = 64) -> None:
        self.device = device
        self.executor = TorchExecutor(device, graphs=graphs)
        self.ends: dict[int, tuple[str | None, Timing]] = {}
        self.order: list[int] = []
        self._changed = threading.Condition()
        self._numbers = itertools.count()

    def serve(self, tenant: str, *, urgent: bool = False, weight_bytes: int = 100) -> FakeModel:
        model = FakeModel(tenant, self.device, weight_bytes)
        model.device = "cpu"
        self.executor.add_model(tenant, self.executor.load(tenant, model, [(1, [(0, 4)])]), urgent=urgent)
        return model

    def start(
        self,
        tenant: str,
        query: int,
        span: tuple[int, int] = (0, 4),
        partition: Share = LEFT,
        rows: int = 1,
        batch: int | None = None,
    ) -> int:
        number = next(self._numbers)
        if span[0] == 0:
            self.executor.put(query, {"x": values(query, rows)})
        batch = query if batch is None else batch
        launch = Launch(number, batch, (query,), Work(tenant, 0, rows, *span), span[1] == 4, partition, 1, 1)
        self.executor.start(launch, self._ended)
        return number

    def run(self, *args: Any, **options: Any) -> str | None:
        return self.wait(self.start(*args, **options))

    def _ended(self, launch: int, error: str | None, timing: Timing) -> None:
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


def test_nothing_ends_before_its_event_and_only_waiters_wait(world: World, device: FakeStreams) -> None:
    model = world.serve("a")
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
    assert device.waiters
    assert all(name.startswith("cotenant-waiter") for name in device.waiters)


def test_a_launch_that_fails_ends_after_those_before_it(world: World, device: FakeStreams) -> None:
    world.serve("a")
    device.gate.clear()
    first = world.start("a", 0)
    world.executor.put(1, {"wrong": values(1)})
    second = world.start("nobody", 1)
    device.gate.set()
    assert world.wait(second) == "model of 'nobody' is not loaded any more"
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
    model = world.serve("a")
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
def test_lanes_of_a_cpu_compute_on_their_first_core_and_wait_on_all() -> None:
    executor = TorchExecutor(CpuStreams())
    model = FakeModel("a")
    executor.add_model("a", model)
    computed: list[set[int]] = []
    waited: list[set[int]] = []
    model.before_run = lambda: computed.append(os.sched_getaffinity(0))
    ended = threading.Semaphore(0)

    def end(_: int, error: str | None, __: Timing) -> None:
        assert error is None
        waited.append(os.sched_getaffinity(0))
        ended.release()

    for query, partition in enumerate((Share(CORES[-1:]), Share(CORES[:2]))):
        executor.put(query, {"x": values(query)})
        executor.start(Launch(query, query, (query,), Work("a", 0, 1, 0, 4), True, partition, 1, 1), end)
        assert ended.acquire(timeout=WAIT_S)
    executor.close()
    assert computed == [{CORES[-1]}, {CORES[0]}]
    assert waited == [{CORES[-1]}, set(CORES[:2])]


# --- urgency -------------------------------------------------------------------------------------------------------


def test_urgent_tenants_have_streams_of_their_own(world: World, device: FakeStreams) -> None:
    world.serve("calm")
    world.serve("urgent", urgent=True)
    for query, tenant in enumerate(("calm", "urgent", "calm")):
        assert world.run(tenant, query) is None
    assert device.streams == [(LEFT, False), (LEFT, True), (LEFT, False)]


# --- graphs --------------------------------------------------------------------------------------------------------


def test_a_range_is_captured_when_it_comes_again(world: World, device: FakeStreams) -> None:
    world.serve("a")
    captures = []
    for query in range(4):
        assert world.run("a", query) is None
        captures.append(len(device.captures))
        np.testing.assert_array_equal(world.answer(query), expected(query))
    assert captures == [0, 1, 1, 1]
    assert device.replays == 3


def test_a_graph_serves_one_range_one_shape_one_lane(world: World, device: FakeStreams) -> None:
    world.serve("a")
    for query in range(2):
        assert world.run("a", query) is None
    assert len(device.captures) == 1
    assert world.run("a", 2, rows=2) is None
    assert world.run("a", 3, partition=RIGHT) is None
    assert world.run("a", 4, (0, 2)) is None
    assert len(device.captures) == 1
    assert world.run("a", 5, rows=2) is None
    assert world.run("a", 6, partition=RIGHT) is None
    assert world.run("a", 7, (0, 2)) is None
    assert device.captures == [LEFT, LEFT, RIGHT, LEFT]
    np.testing.assert_array_equal(world.answer(5), expected(5, 2))
    np.testing.assert_array_equal(world.answer(6), expected(6))


def test_paused_batches_outlive_replays_of_the_same_graph(world: World, device: FakeStreams) -> None:
    world.serve("a")
    for query in range(4):
        assert world.run("a", query, (0, 2)) is None
    assert device.replays == 3
    for query in (2, 0, 3, 1):
        assert world.run("a", query, (2, 4)) is None
    for query in range(4):
        np.testing.assert_array_equal(world.answer(query), expected(query))
    assert world.executor.kept == 0


def test_what_cannot_be_captured_runs_without_and_is_not_tried_again(world: World, device: FakeStreams) -> None:
    world.serve("a")
    device.refuses_capture = True
    for query in range(3):
        assert world.run("a", query) is None
        np.testing.assert_array_equal(world.answer(query), expected(query))
    device.refuses_capture = False
    assert world.run("a", 3) is None
    assert device.captures == []
    assert world.executor.graph_counts.failed == 1


def test_the_pool_is_bounded(device: FakeStreams) -> None:
    world = World(device, graphs=2)
    world.serve("a")
    query = 0
    for rows in (1, 2, 3, 1):  # 1 was evicted by 3 and is captured again
        for _ in range(2):
            assert world.run("a", query, rows=rows) is None
            np.testing.assert_array_equal(world.answer(query), expected(query, rows))
            query += 1
    assert len(device.captures) == 4
    assert world.executor.graph_counts.evicted == 2
    world.executor.close()


def test_no_graphs_where_none_are_asked_for_or_there_are_none() -> None:
    for device, graphs in ((FakeStreams(has_graphs=False), 64), (FakeStreams(), 0)):
        world = World(device, graphs=graphs)
        world.serve("a")
        for query in range(3):
            assert world.run("a", query) is None
        assert device.captures == []
        world.executor.close()


def test_a_new_model_of_a_tenant_does_not_get_the_graphs_of_the_old_one(world: World, device: FakeStreams) -> None:
    world.serve("a")
    for query in range(2):
        assert world.run("a", query) is None
    world.executor.remove_model("a")
    model = world.serve("a")
    assert world.run("a", 2) is None
    assert model.runs == 1
    assert len(device.captures) == 1


def test_graphs_are_forgotten_before_the_device_is_divided_anew(world: World, device: FakeStreams) -> None:
    world.serve("a")
    for query in range(2):
        assert world.run("a", query) is None
    world.executor.forget_graphs()
    assert world.run("a", 2) is None  # its stream may be a new one: nothing is captured before something ran there
    assert len(device.captures) == 1
    assert world.run("a", 3) is None
    assert len(device.captures) == 2


# --- memory --------------------------------------------------------------------------------------------------------


def test_the_least_used_idle_model_gives_way_and_comes_back(device: FakeStreams) -> None:
    device.memory_bytes = 250
    world = World(device)
    a, b = world.serve("a"), world.serve("b")
    for query, tenant in enumerate(("a", "b", "a", "a")):
        assert world.run(tenant, query) is None
    c = world.serve("c")  # b was used less recently than a
    assert (a.device, b.device, c.device) == (GPU, "cpu", GPU)
    assert world.run("b", 4) is None  # now it is a: c has just been loaded
    np.testing.assert_array_equal(world.answer(4), expected(4))
    assert (a.device, b.device, c.device) == ("cpu", GPU, GPU)
    world.executor.close()


def test_a_launch_that_finds_no_room_is_tried_again_after_eviction(world: World, device: FakeStreams) -> None:
    a, b = world.serve("a"), world.serve("b")
    for query in range(2):
        assert world.run("b", query) is None  # a graph of b, too
    left: list[weakref.ref[torch.Tensor]] = []

    def runs_out() -> None:
        if b.device == GPU:
            scratch = torch.empty(4)
            left.append(weakref.ref(scratch))
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert left[0]() is None, "the first try still holds its tensors"

    a.before_run = runs_out
    assert world.run("a", 2) is None
    np.testing.assert_array_equal(world.answer(2), expected(2))
    assert b.moves == [GPU, "cpu"]
    assert world.run("b", 3) is None
    np.testing.assert_array_equal(world.answer(3), expected(3))


def test_a_model_with_a_launch_under_way_is_not_evicted_and_the_launch_fails_alone(
    world: World, device: FakeStreams
) -> None:
    a, b = world.serve("a", weight_bytes=3 << 20), world.serve("b")
    device.gate.clear()
    busy = world.start("b", 0, partition=RIGHT)

    tries = [True, True, False]
    reached_last = threading.Event()

    def runs_out() -> None:
        if tries.pop(0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        reached_last.set()

    a.before_run = runs_out
    failing = world.start("a", 1, (0, 2), rows=1 << 16)
    other = world.start("a", 2, (0, 2))
    last = world.start("a", 3)
    # One thread submits all three, so when it comes to the last it has looked for room for the others in vain.
    assert reached_last.wait(WAIT_S)
    device.gate.set()
    reason = world.wait(failing)
    assert reason == (
        "out of memory on cuda:0: no room for units 0 to 2 of 65536 rows (0.8 MiB of tensors) of model 'a', which has "
        "3.0 MiB of weights; idle models evicted: none"
    )
    assert world.wait(busy) is None
    assert b.device == GPU
    assert world.wait(other) is not None
    assert world.wait(last) is None
    world.executor.discard(1)
    world.executor.discard(2)
    for query in (0, 3):
        world.answer(query)
    assert world.executor.kept == 0


def test_a_launch_that_begins_while_its_model_leaves_waits_and_brings_it_back(device: FakeStreams) -> None:
    """Nothing may run, or be captured, on weights whose memory is about to be another's."""
    world = World(device)
    device.memory_bytes = 250
    a, b = world.serve("a"), world.serve("b")
    for query in range(2):
        assert world.run("a", query) is None  # a graph, too
    assert world.run("b", 2) is None
    leaving, go_on = threading.Event(), threading.Event()
    move = a.move

    def slow(where: str) -> None:
        leaving.set()
        assert go_on.wait(WAIT_S)
        move(where)

    a.move = slow  # type: ignore[method-assign]
    late: list[FakeModel] = []
    thread = threading.Thread(target=lambda: late.append(world.serve("c")), daemon=True)
    thread.start()
    assert leaving.wait(WAIT_S)
    a.move = move  # type: ignore[method-assign]
    runs = a.runs
    waiting = world.start("a", 3)
    assert world.run("b", 4, partition=RIGHT) is None  # others go on
    assert a.runs == runs
    go_on.set()
    thread.join(WAIT_S)
    assert world.wait(waiting) is None
    np.testing.assert_array_equal(world.answer(3), expected(3))
    assert a.moves == [GPU, "cpu", GPU]
    assert "cpu" in (b.device, late[0].device)
    world.executor.close()


def test_a_model_that_does_not_fit_is_not_loaded(device: FakeStreams) -> None:
    device.memory_bytes = 250
    world = World(device)
    a = world.serve("a")
    with pytest.raises(ModelError, match="out of memory on cuda:0: no room for the weights of model 'big'") as caught:
        world.serve("big", weight_bytes=300)
    assert "idle models evicted: a" in str(caught.value)
    assert world.run("a", 0) is None
    assert a.device == GPU
    world.executor.close()


def test_a_host_without_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 45)
    wrapped = ModelError(Path("m"), "units 0 to 1 failed", "")
    wrapped.__cause__ = caught.value
    assert CpuStreams().is_out_of_memory(wrapped)
    assert not CpuStreams().is_out_of_memory(RuntimeError("something else"))


def test_answers_are_right_while_models_come_and_go_on_several_lanes() -> None:
    """Room for two models of four; batches in segments, each on any lane; graphs evicted all the time."""
    device = FakeStreams(memory_bytes=250)
    world = World(device, graphs=5)
    tenants = ("a", "b", "c", "d")
    for tenant in tenants:
        world.serve(tenant, urgent=tenant == "d")
    lanes = (LEFT, RIGHT, Share((4,), GPU))
    plans: list[list[int]] = []
    for seed in range(3):  # as many clients as lanes, so that one model at least is idle
        rng = np.random.default_rng(seed)
        plans.append([int(number) for number in rng.integers(0, 1 << 16, 60)])
    wrong: list[str] = []
    answered: list[int] = []

    def client(number: int) -> None:
        for step, choice in enumerate(plans[number]):
            query, rows, cut = 1000 * number + step, 1 + choice % 2, 1 + choice // 2 % 3
            tenant = tenants[choice // 16 % 4]
            for at, span in enumerate(((0, cut), (cut, 4))):
                reason = world.run(tenant, query, span, lanes[(choice >> at) % 3], rows=rows)
                if reason is not None:
                    if "out of memory" not in reason:
                        wrong.append(reason)
                    world.executor.discard(query)
                    break
            else:
                answered.append(query)
                if not np.array_equal(world.answer(query), expected(query, rows)):
                    wrong.append(f"query {query} of {tenant}")

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert wrong == []
    assert len(answered) > 60
    assert world.executor.kept == 0
    assert world.executor.graph_counts.evicted > 0
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


def test_a_device_that_is_lost_says_so_for_every_tenant(world: World, device: FakeStreams) -> None:
    world.serve("a")
    other = world.serve("b")
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

    world.executor.start(Launch(0, 0, (0,), Work("a", 0, 1, 0, 4), True, LEFT, 1, 1), end)
    assert ended.wait(WAIT_S)
    assert reasons == ["input 'x' is object, which torch has no tensors of"]


# --- life of models ------------------------------------------------------------------------------------------------


def test_a_model_is_closed_when_its_launches_have_ended(world: World, device: FakeStreams) -> None:
    model = FakeModel("a", device)
    loaded = world.executor.load("a", model, [(1, [(0, 4)])])
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
    assert world.run("a", 1) == "model of 'a' is not loaded any more"


def test_only_torch_models_are_taken(world: World) -> None:
    class OnnxModel:
        path = Path("m/1/model.onnx")

    with pytest.raises(ModelError, match="cuda:0 runs torch models alone"):
        world.executor.load("a", OnnxModel(), [])  # type: ignore[arg-type]


# --- the pool alone ------------------------------------------------------------------------------------------------


def key(number: int, owner: int = 1) -> GraphKey:
    return GraphKey(owner, 0, number, (("x", (1, 3), "float32"),), LEFT)


def test_the_graph_that_was_not_used_for_longest_goes() -> None:
    pool: GraphPool[str] = GraphPool(2)
    assert pool.add(key(1), "one") == []
    assert pool.add(key(2), "two") == []
    assert pool.find(key(1)) == "one"
    assert pool.add(key(3), "three") == ["two"]
    assert pool.find(key(2)) is None
    assert len(pool) == 2
    counts = pool.counts
    assert (counts.captured, counts.replayed, counts.evicted) == (3, 1, 1)


def test_a_range_is_due_the_second_time_unless_it_failed() -> None:
    pool: GraphPool[str] = GraphPool(2)
    assert [pool.is_due(key(1)), pool.is_due(key(1)), pool.is_due(key(2))] == [False, True, False]
    pool.fail(key(1), "")
    assert not pool.is_due(key(1))
    assert pool.reason(key(1)) == "it failed"
    assert pool.reason(key(2)) == ""


def test_what_is_remembered_is_bounded() -> None:
    pool: GraphPool[str] = GraphPool(1)
    assert not pool.is_due(key(1))
    for number in range(2, 40):
        pool.is_due(key(number))
    assert not pool.is_due(key(1)), "it was forgotten long ago"


def test_the_graphs_of_one_owner_are_dropped() -> None:
    pool: GraphPool[str] = GraphPool(4)
    pool.add(key(1), "mine")
    pool.add(key(1, owner=2), "yours")
    assert pool.drop(1) == ["mine"]
    assert pool.find(key(1, owner=2)) == "yours"
    assert pool.is_due(key(3)) is False
    assert pool.clear() == ["yours"]
    assert pool.is_due(key(3)) is False


def test_a_pool_has_no_negative_size() -> None:
    with pytest.raises(InvalidValueError, match="capacity"):
        GraphPool(-1)
