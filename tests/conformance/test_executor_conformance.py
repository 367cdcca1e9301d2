"""What every executor promises to a driver. Add a Case to CASES to hold another one to it.

A Case builds an executor that serves one tenant with a model of several units and one with a model of one unit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cotenant.core.actions import Launch
from cotenant.execute.batches import RowsError
from cotenant.execute.protocol import Timing
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.execute.threads.lanes import Lane, pin
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.work import Share, Work
from cotenant.world.simulated import SimulatedExecutor
from executors import (
    BOTH,
    CASES,
    CORES,
    ON_DEVICE,
    ONE,
    OTHER,
    SHARED,
    TORCH,
    WAIT_S,
    Case,
    Runner,
    assert_equal,
    onnxruntime_case,
    torch_cpu_case,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("models")
    yield made
    if made in SHARED:
        SHARED.pop(made).close()
    for place in [place for place in TORCH if place[0] == made]:
        for model in TORCH.pop(place):
            model.close()


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.device if name in ON_DEVICE else ()) for name in sorted(CASES)]
)
def case(request: pytest.FixtureRequest, folder: Path) -> Iterator[Case]:
    with CASES[request.param](folder) as made:
        yield made


@pytest.fixture
def runner(case: Case) -> Runner:
    return Runner(case)


def test_a_whole_launch_answers_its_query(case: Case, runner: Runner) -> None:
    inputs = case.inputs(1, 1)
    runner.put(7, inputs)
    assert runner.wait(runner.whole("cnn", 7)) == [None]
    assert_equal(case.executor.take(7), case.expected(inputs))
    assert case.kept() == 0


def test_a_launch_in_segments_answers_as_a_whole_one(case: Case, runner: Runner) -> None:
    inputs = case.inputs(2, 2)
    runner.put(0, inputs)
    cuts = [0, 1, case.units // 2, case.units - 1, case.units]
    for start, end in pairwise(cuts):
        assert runner.wait(runner.start("cnn", (0,), (start, end), end == case.units, batch=5)) == [None]
    assert_equal(case.executor.take(0), case.expected(inputs))
    assert case.kept() == 0


def test_a_batch_may_go_on_elsewhere(case: Case, runner: Runner) -> None:
    """Segments of one batch on several partitions, one of several cores."""
    inputs = case.inputs(3, 1)
    runner.put(0, inputs)
    middle = case.units // 2
    runner.wait(runner.start("cnn", (0,), (0, 2), False, ONE, batch=1))
    runner.wait(runner.start("cnn", (0,), (2, middle), False, BOTH, batch=1))
    assert runner.wait(runner.start("cnn", (0,), (middle, case.units), True, OTHER, batch=1)) == [None]
    assert_equal(case.executor.take(0), case.expected(inputs))


@pytest.mark.parametrize("rows", [(1, 1), (2, 1, 3), (1, 4)])
@pytest.mark.parametrize("in_segments", [False, True])
def test_the_queries_of_a_batch_get_their_own_rows(
    case: Case, runner: Runner, rows: tuple[int, ...], in_segments: bool
) -> None:
    asked = {10 + seed: case.inputs(seed, count) for seed, count in enumerate(rows)}
    for query, inputs in asked.items():
        runner.put(query, inputs)
    if in_segments:
        runner.wait(runner.start("cnn", tuple(asked), (0, 3), False, batch=1))
        last = runner.start("cnn", tuple(asked), (3, case.units), True, batch=1)
    else:
        last = runner.whole("cnn", *asked)
    assert runner.wait(last) == [None]
    for query, inputs in asked.items():
        got = case.executor.take(query)
        assert_equal(got, case.expected(inputs))
    assert case.kept() == 0


LEAVERS = [
    pytest.param(((0,), ()), id="first"),
    pytest.param(((1,), ()), id="middle"),
    pytest.param(((3,), ()), id="last"),
    pytest.param(((0, 2), ()), id="two"),
    pytest.param(((0, 1, 2), ()), id="all-but-the-last"),
    pytest.param(((1, 2, 3), ()), id="all-but-the-first"),
    pytest.param(((0,), (1,)), id="one-after-another"),
    pytest.param(((2,), (0, 3)), id="two-after-one"),
    pytest.param(((), (0,)), id="at-the-second-cut"),
]
"""Places of the members that leave a batch of four at its first and at its second cut."""


@pytest.mark.parametrize("leavers", LEAVERS)
@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (2, 1, 3, 1)], ids=["single", "several"])
def test_those_who_stay_when_others_leave_at_a_cut_get_their_own_rows(
    case: Case, runner: Runner, rows: tuple[int, ...], leavers: tuple[tuple[int, ...], ...]
) -> None:
    """Whatever made them leave (a cancel, a withdrawn stage, a failure): it is a discard between two launches."""
    asked = {20 + place: case.inputs(place, count) for place, count in enumerate(rows)}
    for query, inputs in asked.items():
        runner.put(query, inputs)
    left = list(asked)
    cuts = [0, 2, 3, case.units]
    for at, (start, end) in enumerate(pairwise(cuts)):
        assert runner.wait(runner.start("cnn", tuple(left), (start, end), end == case.units, batch=1)) == [None]
        for place in leavers[at] if at < len(leavers) else ():
            case.executor.discard(20 + place)
            left.remove(20 + place)
    for query in left:
        assert_equal(case.executor.take(query), case.expected(asked[query]))
    assert case.kept() == 0


def test_a_launch_that_is_not_of_its_batch_answers_nobody(case: Case, runner: Runner) -> None:
    """Whose rows are whose is known, or the launch fails: other rows, or a query that came from elsewhere."""
    for query in range(4):
        runner.put(query, case.inputs(query, 1))
    runner.wait(runner.start("cnn", (0, 1), (0, 2), False, batch=1))
    before = runner.start("cnn", (2, 3), (0, 2), False, batch=2)
    runner.wait(before)
    for queries, items in (((0, 2), 2), ((0, 1), 3), ((0,), 1)):
        runner.items[1] = items
        with suppress(RowsError):
            [error] = runner.wait(runner.start("cnn", queries, (2, case.units), True, batch=1))
            assert error
            assert "rows" in error
    runner.items[1] = 2
    assert runner.wait(runner.start("cnn", (0, 1), (2, case.units), True, batch=1)) == [None]
    for query in (0, 1):
        assert_equal(case.executor.take(query), case.expected(case.inputs(query, 1)))
    case.executor.release(2)
    for query in (2, 3):
        with pytest.raises(KeyError):
            case.executor.take(query)
    assert case.kept() == 0


def test_a_launch_that_raises_fails_alone_and_the_lane_goes_on(case: Case, runner: Runner) -> None:
    good, bad = case.picky
    for query, inputs in enumerate((good, bad, good)):
        runner.put(query, inputs)
    first = runner.whole("picky", 0)
    runner.wait(first)
    case.fails(True)
    second = runner.whole("picky", 1)
    runner.wait(second)
    case.fails(False)
    third = runner.whole("picky", 2)
    errors = runner.wait(first, second, third)
    assert errors[0] is None
    assert errors[2] is None
    assert errors[1]
    assert "/" not in errors[1].replace("onnxruntime/", "")  # no path of this machine reaches the client
    assert "\n" not in errors[1]
    case.executor.discard(1)
    case.executor.release(second)
    case.executor.take(0)
    case.executor.take(2)
    assert case.kept() == 0


def test_release_frees_a_paused_batch_and_discard_its_query(case: Case, runner: Runner) -> None:
    runner.put(0, case.inputs(1, 1))
    assert runner.wait(runner.start("cnn", (0,), (0, 2), False, batch=3)) == [None]
    case.executor.discard(0)
    case.executor.release(3)
    assert case.kept() == 0


def test_a_query_that_ends_while_it_runs_leaves_nothing_behind(case: Case, runner: Runner) -> None:
    """Cancelled in its last segment: its outputs come when nobody will take them."""
    held = threading.Event()
    if isinstance(
        case.executor, ThreadExecutor | TorchExecutor
    ):  # hold the lane, so that the discard surely comes first
        launch = Launch(99, 99, (), Work("nobody", 0, 0, 1, 2), True, ONE, 1)
        case.executor.start(launch, lambda *_: held.wait(WAIT_S) and None)
    for query in (0, 1):
        runner.put(query, case.inputs(query, 1))
    launch_number = runner.whole("cnn", 0, 1)
    case.executor.discard(0)
    held.set()
    assert runner.wait(launch_number) == [None]
    assert_equal(case.executor.take(1), case.expected(case.inputs(1, 1)))
    assert case.kept() == 0


def test_launches_of_one_partition_run_in_order(case: Case, runner: Runner) -> None:
    if isinstance(case.executor, SimulatedExecutor):
        pytest.skip("the simulated world has no queue: the core never gives a partition two launches")
    for query in range(8):
        runner.put(query, case.inputs(query, 1))
    launches = [runner.whole("cnn", query) for query in range(8)]
    runner.wait(*launches)
    assert list(runner.ends) == launches


IN_THREADS = pytest.mark.parametrize("make", [onnxruntime_case, torch_cpu_case], ids=["onnxruntime", "torch-cpu"])
"""Executors whose threads are this process's own."""


@IN_THREADS
def test_close_waits_for_what_runs(folder: Path, make: Any) -> None:
    with make(folder) as case:
        runner = Runner(case)
        for query in range(4):
            runner.put(query, case.inputs(query, 8))
        launches = [runner.whole("cnn", query, partition=(ONE, OTHER)[query % 2]) for query in range(4)]
        case.executor.close()
        assert set(runner.ends) == set(launches)
        assert all(error is None for error, _, _ in runner.ends.values())
        lanes = {thread for _, _, thread in runner.ends.values()}
        assert not any(thread.is_alive() for thread in lanes)


@IN_THREADS
def test_a_model_that_is_gone_fails_its_launches_with_a_reason(folder: Path, make: Any) -> None:
    with make(folder) as case:
        assert isinstance(case.executor, ThreadExecutor | TorchExecutor)
        runner = Runner(case)
        for query in (0, 1):
            runner.put(query, case.inputs(query, 1))
        runner.wait(runner.start("cnn", (0,), (0, 2), False, batch=1))
        case.executor.remove_model("cnn")
        errors = runner.wait(runner.start("cnn", (0,), (2, case.units), True, batch=1), runner.whole("cnn", 1))
        assert errors == ["the model of tenant 'cnn' is not loaded any more"] * 2


@IN_THREADS
def test_timing_says_where_the_time_went(folder: Path, make: Any) -> None:
    with make(folder) as case:
        runner = Runner(case)
        for query in (0, 1):
            runner.put(query, case.inputs(query, 1))
        runner.wait(runner.whole("cnn", 0, 1))
        timing = runner.ends[0][1]
        assert timing.input_ns > 0
        assert timing.infer_ns > 0
        assert timing.output_ns > 0


@pytest.mark.skipif(len(CORES) < 2, reason="one core only")
def test_lanes_sit_on_their_cores_and_are_nice(folder: Path) -> None:
    base = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen: dict[Share, tuple[set[int], int]] = {}
    with onnxruntime_case(folder) as case:
        for query, partition in enumerate((ONE, OTHER, BOTH)):
            case.executor.put(query, case.picky[0])
            ended = threading.Event()

            def look(_: int, error: str | None, __: Timing, partition: Share = partition, e: Any = ended) -> None:
                assert error is None
                thread = threading.get_native_id()
                seen[partition] = os.sched_getaffinity(thread), os.getpriority(os.PRIO_PROCESS, thread)
                e.set()

            case.executor.start(Launch(query, query, (query,), Work("picky", 0, 1, 0, 1), True, partition, 1), look)
            assert ended.wait(WAIT_S)
    nice = max(base, 3)
    assert seen == {ONE: ({CORES[0]}, nice), OTHER: ({CORES[-1]}, nice), BOTH: ({CORES[0]}, nice)}
    assert os.sched_getaffinity(0) == set(CORES)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == base


@pytest.mark.skipif(len(CORES) < 2, reason="one core only")
def test_a_lane_that_a_pinned_thread_started_sits_on_its_own_core() -> None:
    """Threads inherit the cores of the one that starts them, and lanes are often started by a lane."""
    seen: list[set[int]] = []
    done = threading.Event()

    def look() -> None:
        seen.append(os.sched_getaffinity(0))
        done.set()

    def start() -> None:
        pin(CORES[:1])
        lane = Lane(OTHER)
        lane.put(look)
        lane.close()

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert done.is_set()
    assert seen == [{CORES[-1]}]


def test_a_core_that_is_not_there_leaves_the_lane_unpinned() -> None:
    seen: list[set[int]] = []
    lane = Lane(Share((1000,)))
    lane.put(lambda: seen.append(os.sched_getaffinity(0)))
    lane.close()
    assert seen == [set(CORES)]


def test_sessions_never_spin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every session that the executor runs on, whole or segment, of one core or of several."""
    import onnxruntime as ort

    from cotenant.execute.onnx import segment_session

    made: list[ort.SessionOptions] = []
    real = ort.InferenceSession

    def spy(source: Any, options: ort.SessionOptions, **kwargs: Any) -> ort.InferenceSession:
        made.append(options)
        return real(source, options, **kwargs)

    with onnxruntime_case(folder) as case:
        monkeypatch.setattr(segment_session.ort, "InferenceSession", spy)
        runner = Runner(case)
        for partition in (ONE, BOTH):
            runner.put(0, case.inputs(1, 1))
            assert runner.wait(runner.whole("cnn", 0, partition=partition)) == [None]
            batch = 100 + partition.size
            case.executor.put(batch, case.inputs(1, 1))
            runner.wait(runner.start("cnn", (batch,), (0, 3), False, partition, batch=batch))
            runner.wait(runner.start("cnn", (batch,), (3, case.units), True, partition, batch=batch))
    assert len(made) == 6  # the whole model and two segments, on one core and on two
    for options in made:
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        assert options.get_session_config_entry("session.inter_op.allow_spinning") == "0"
        assert options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
        assert options.intra_op_num_threads in (1, BOTH.size)
    assert {options.intra_op_num_threads for options in made} == {1, BOTH.size}
