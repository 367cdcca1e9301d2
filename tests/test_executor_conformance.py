"""What every executor promises to a driver. Add a Case to CASES to hold another one to it.

A Case builds an executor that serves one tenant with a model of several units and one with a model of one unit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from cotenant.core.actions import Launch
from cotenant.execute.batches import RowsError
from cotenant.execute.contention import Contention, ContentionWorld, Traffic
from cotenant.execute.gpu.cuda_streams import CudaStreams
from cotenant.execute.gpu.sm_streams import PlainShares
from cotenant.execute.gpu.streams import CpuStreams, StreamDevice
from cotenant.execute.lanes import Lane, pin
from cotenant.execute.onnx import segment_session
from cotenant.execute.onnx.executor import OnnxRuntimeExecutor
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.protocol import Executor, Tensors, Timing
from cotenant.execute.simulated import SimulatedExecutor, TableWorld, World
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.execute.torch.model import TorchModel
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.execute.worker.limits import Limits
from cotenant.predict.table import LatencyRow, LatencyTable, TablePredictor
from cotenant.serve.clock import RealClock
from cotenant.types import Partition
from onnx_samples import Sketch, info, residual_cnn
from torch_small import save_small, small_cnn

WAIT_S = 20.0
CORES = tuple(sorted(os.sched_getaffinity(0)))
ONE = Partition(CORES[:1])
OTHER = Partition(CORES[-1:])
BOTH = Partition(CORES[:2])


def picky() -> onnx.ModelProto:
    """Rows of a table, chosen by an index: an index outside of it raises at run time."""
    s = Sketch(3)
    s.constant(np.arange(20, dtype=np.float32).reshape(10, 2), "table")
    s.op("Gather", "table", "index", out="y", axis=0)
    return s.model([info("index", ["batch"], onnx.TensorProto.INT64)], [info("y", ["batch", 2])])


@dataclass
class Case:
    """An executor that serves the tenants 'cnn' (units 0 to `units`, input x) and 'picky' (1 unit)."""

    executor: Executor
    units: int
    inputs: Callable[[int, int], Tensors]
    """(seed, rows) of the tenant cnn."""
    expected: Callable[[Tensors], Tensors]
    """What a query with these inputs gets back."""
    picky: tuple[Tensors, Tensors]
    """Inputs of the tenant picky that run, and ones that fail."""
    fails: Callable[[bool], None] = field(default=lambda _: None)
    """Told before a launch whether it must fail."""
    kept: Callable[[], int] = lambda: 0
    """How many queries and batches the executor holds tensors of."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("models")
    onnx.save(residual_cnn(), made / "cnn.onnx")
    onnx.save(picky(), made / "picky.onnx")
    yield made
    if made in SHARED:
        SHARED.pop(made).close()
    for place in [place for place in TORCH if place[0] == made]:
        for model in TORCH.pop(place):
            model.close()


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def image(seed: int, rows: int) -> Tensors:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 3, 16, 16)).astype(np.float32)}


@contextmanager
def onnxruntime_case(folder: Path) -> Iterator[Case]:
    executor = OnnxRuntimeExecutor(lane_nice=3)
    reference = session(folder / "cnn.onnx")
    with (
        SegmentedModel.open(folder / "cnn.onnx", cache_dir=folder / "graphs") as cnn,
        SegmentedModel.open(folder / "picky.onnx", cache_dir=folder / "graphs") as one,
    ):
        executor.add_model("cnn", cnn)
        executor.add_model("picky", one)
        yield Case(
            executor,
            cnn.unit_count,
            image,
            lambda inputs: {"y": reference.run(None, dict(inputs))[0]},
            ({"index": np.array([3])}, {"index": np.array([99])}),
            kept=lambda: executor.kept,
        )
        executor.close()


def process_executor(folder: Path, limits: Limits = Limits()) -> ProcessExecutor:
    """Worker processes of the tenants 'cnn' and 'picky'."""
    executor = ProcessExecutor(3, limits)
    for tenant in ("cnn", "picky"):
        model = SegmentedModel.open(folder / f"{tenant}.onnx", cache_dir=folder / "graphs")
        executor.add_model(tenant, executor.load(tenant, model, [(1, [(0, model.unit_count)])]))
    return executor


def process_case_of(executor: ProcessExecutor, folder: Path) -> Case:
    reference = session(folder / "cnn.onnx")
    with SegmentedModel.open(folder / "cnn.onnx", cache_dir=folder / "graphs") as cnn:
        units = cnn.unit_count
    return Case(
        executor,
        units,
        image,
        lambda inputs: {"y": reference.run(None, dict(inputs))[0]},
        ({"index": np.array([3])}, {"index": np.array([99])}),
        kept=lambda: executor.kept,
    )


SHARED: dict[Path, ProcessExecutor] = {}
"""Workers take half a second to start: those of a folder serve all tests that leave them alive."""


@contextmanager
def shared_process_case(folder: Path) -> Iterator[Case]:
    if folder not in SHARED:
        SHARED[folder] = process_executor(folder)
    yield process_case_of(SHARED[folder], folder)


@contextmanager
def process_case(folder: Path) -> Iterator[Case]:
    """With workers of its own, for tests that end them."""
    executor = process_executor(folder)
    yield process_case_of(executor, folder)
    executor.close()


@contextmanager
def simulated_case(folder: Path, base: Callable[[TablePredictor], World] = TableWorld) -> Iterator[Case]:
    """The world is told which launch fails; queries get their own inputs back."""
    table = LatencyTable((LatencyRow(0, 1, 1, 100_000),), (1.0,) * 6)
    world = base(TablePredictor({"cnn": table, "picky": LatencyTable((LatencyRow(0, 1, 1, 50_000),))}))
    clock = RealClock()
    executor = SimulatedExecutor(world, clock)
    plain = {"index": np.array([3])}
    yield Case(
        executor,
        6,
        image,
        lambda inputs: inputs,
        (plain, plain),
        lambda must: setattr(world, "_failure_rate", 1.0 if must else 0.0),
        lambda: executor.kept,
    )
    executor.close()
    clock.close()


@contextmanager
def contention_case(folder: Path) -> Iterator[Case]:
    """Launches that run at one time share a memory that is too slow for two of them."""
    traffic = {"cnn": Traffic((0,) * 6, ((20_000,) * 6,)), "picky": Traffic((0,), ((50_000,),))}
    contention = Contention(1_200_000_000, None, traffic)
    with simulated_case(folder, lambda tables: ContentionWorld(tables, contention, grain_ns=1)) as made:
        yield made


TORCH: dict[tuple[Path, str], tuple[TorchModel, TorchModel]] = {}
"""Exporting and opening takes seconds: the models of a folder serve all tests, each with its own executor."""


@contextmanager
def torch_case(folder: Path, device: StreamDevice, bad: Tensors) -> Iterator[Case]:
    if not (folder / "cnn.pt2").exists():
        save_small(folder)
    if (folder, device.name) not in TORCH:
        cnn, one = (TorchModel.open(folder / f"{name}.pt2", device=device.name) for name in ("cnn", "picky"))
        TORCH[folder, device.name] = cnn, one
    cnn, one = TORCH[folder, device.name]
    executor = TorchExecutor(device)
    executor.add_model("cnn", cnn)
    executor.add_model("picky", one)
    reference = small_cnn()

    def expected(inputs: Tensors) -> Tensors:
        with torch.inference_mode():
            return {cnn.outputs[0].name: reference(torch.from_numpy(inputs["x"])).numpy()}

    good = {"index": np.array([3])}
    yield Case(executor, cnn.unit_count, image, expected, (good, bad), kept=lambda: executor.kept)
    executor.close()


@contextmanager
def torch_cpu_case(folder: Path) -> Iterator[Case]:
    with torch_case(folder, CpuStreams(nice=3), {"index": np.array([99])}) as made:
        yield made


class CoresAsShares(PlainShares):
    """Streams of a GPU for partitions that name cores, each made when it is first asked for."""

    def stream(self, partition: Partition, urgent: bool = False) -> torch.cuda.Stream:
        slots = Partition(tuple(range(partition.size)), "cuda:0")
        if slots not in self.granted:
            self.split([*self.granted, slots])
        return super().stream(slots, urgent)


@contextmanager
def torch_cuda_case(folder: Path) -> Iterator[Case]:
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    torch.backends.cudnn.allow_tf32 = False  # answers are compared with those of a CPU
    device = CudaStreams(0, CoresAsShares.open(0))
    with torch_case(folder, device, {"index": np.array([3.0])}) as made:  # a kernel that fails would end the device
        yield made


CASES = {
    "onnxruntime": onnxruntime_case,
    "processes": shared_process_case,
    "simulated": simulated_case,
    "contention": contention_case,
    "torch-cpu": torch_cpu_case,
    "torch-cuda": torch_cuda_case,
}
ON_DEVICE = {"torch-cuda"}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.device if name in ON_DEVICE else ()) for name in sorted(CASES)]
)
def case(request: pytest.FixtureRequest, folder: Path) -> Iterator[Case]:
    with CASES[request.param](folder) as made:
        yield made


class Runner:
    """Starts launches and waits for their ends."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ends: dict[int, tuple[str | None, Timing, threading.Thread]] = {}
        self._changed = threading.Condition()
        self._count = 0
        self._rows: dict[int, int] = {}
        self.items: dict[int, int] = {}

    def put(self, query: int, inputs: Tensors) -> None:
        self._rows[query] = len(next(iter(inputs.values())))
        self.case.executor.put(query, inputs)

    def start(
        self,
        tenant: str,
        queries: tuple[int, ...],
        span: tuple[int, int],
        last: bool,
        partition: Partition = ONE,
        batch: int | None = None,
    ) -> int:
        number = self._count
        self._count += 1
        batch = number if batch is None else batch
        if span[0] == 0:
            self.items[batch] = sum(self._rows.get(query, 1) for query in queries)
        launch = Launch(number, batch, tenant, queries, self.items[batch], 0, *span, last, partition, 1, 1)
        self.case.executor.start(launch, self._ended)
        return number

    def whole(self, tenant: str, *queries: int, partition: Partition = ONE) -> int:
        return self.start(tenant, queries, (0, self.case.units if tenant == "cnn" else 1), True, partition)

    def _ended(self, launch: int, error: str | None, timing: Timing) -> None:
        with self._changed:
            assert launch not in self.ends, "a launch ended twice"
            self.ends[launch] = error, timing, threading.current_thread()
            self._changed.notify_all()

    def wait(self, *launches: int) -> list[str | None]:
        with self._changed:
            assert self._changed.wait_for(lambda: set(launches) <= set(self.ends), WAIT_S)
            return [self.ends[launch][0] for launch in launches]


@pytest.fixture
def runner(case: Case) -> Runner:
    return Runner(case)


def assert_equal(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)


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
        case.executor, OnnxRuntimeExecutor | TorchExecutor
    ):  # hold the lane, so that the discard surely comes first
        launch = Launch(99, 99, "nobody", (), 0, 0, 1, 2, True, ONE, 1, 1)
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
        assert isinstance(case.executor, OnnxRuntimeExecutor | TorchExecutor)
        runner = Runner(case)
        for query in (0, 1):
            runner.put(query, case.inputs(query, 1))
        runner.wait(runner.start("cnn", (0,), (0, 2), False, batch=1))
        case.executor.remove_model("cnn")
        errors = runner.wait(runner.start("cnn", (0,), (2, case.units), True, batch=1), runner.whole("cnn", 1))
        assert errors == ["model of 'cnn' is not loaded any more"] * 2


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
    seen: dict[Partition, tuple[set[int], int]] = {}
    with onnxruntime_case(folder) as case:
        for query, partition in enumerate((ONE, OTHER, BOTH)):
            case.executor.put(query, case.picky[0])
            ended = threading.Event()

            def look(_: int, error: str | None, __: Timing, partition: Partition = partition, e: Any = ended) -> None:
                assert error is None
                thread = threading.get_native_id()
                seen[partition] = os.sched_getaffinity(thread), os.getpriority(os.PRIO_PROCESS, thread)
                e.set()

            case.executor.start(Launch(query, query, "picky", (query,), 1, 0, 0, 1, True, partition, 1, 1), look)
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

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(WAIT_S)
    assert done.is_set()
    assert seen == [{CORES[-1]}]


def test_a_core_that_is_not_there_leaves_the_lane_unpinned() -> None:
    seen: list[set[int]] = []
    lane = Lane(Partition((1000,)))
    lane.put(lambda: seen.append(os.sched_getaffinity(0)))
    lane.close()
    assert seen == [set(CORES)]


def test_sessions_never_spin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every session that the executor runs on, whole or segment, of one core or of several."""
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
