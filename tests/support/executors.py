"""Executors that serve the same two tenants, and what their driver does with them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from cotenant.core.actions import Launch
from cotenant.execute.gpu import sm_ladder
from cotenant.execute.gpu.cuda_streams import CudaStreams
from cotenant.execute.gpu.sm_shares import GreenShares
from cotenant.execute.gpu.sm_streams import GpuPartitioner, PlainShares
from cotenant.execute.gpu.streams import CpuStreams, StreamDevice
from cotenant.execute.protocol import Executor, LoadSpec, Tensors, Timing
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.execute.torch.model import TorchModel
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.repository.formats import Arithmetic
from cotenant.serve.engine.clock import RealClock
from cotenant.work import Share, Work
from cotenant.world.contention import Contention, ContentionWorld, Traffic
from cotenant.world.simulated import SimulatedExecutor, TableWorld, World
from torch_small import save_small, small_cnn

if TYPE_CHECKING:
    from cotenant.execute.worker.executor import ProcessExecutor
    from cotenant.execute.worker.limits import WorkerLimits

WAIT_S = 20.0
CORES = tuple(sorted(os.sched_getaffinity(0)))
ONE = Share(CORES[:1])
OTHER = Share(CORES[-1:])
BOTH = Share(CORES[:2])


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
    """Is asked before a launch whether it must fail."""
    kept: Callable[[], int] = lambda: 0
    """How many queries and batches the executor holds tensors of."""


def session(path: Path) -> Any:
    import onnxruntime as ort  # which a machine with a GPU may lack

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def image(seed: int, rows: int) -> Tensors:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 3, 16, 16)).astype(np.float32)}


def save_onnx(folder: Path) -> None:
    """Write `cnn.onnx` and `picky.onnx`, once."""
    import onnx

    from onnx_samples import picky, residual_cnn

    if not (folder / "picky.onnx").exists():
        onnx.save(residual_cnn(), folder / "cnn.onnx")
        onnx.save(picky(), folder / "picky.onnx")


@contextmanager
def onnxruntime_case(folder: Path) -> Iterator[Case]:
    from cotenant.execute.onnx.segments import SegmentedModel

    save_onnx(folder)
    executor = ThreadExecutor(lane_nice=3)
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


def process_executor(folder: Path, limits: WorkerLimits | None = None) -> ProcessExecutor:
    """Worker processes of the tenants 'cnn' and 'picky'."""
    from cotenant.execute.onnx.segments import SegmentedModel
    from cotenant.execute.worker.executor import ProcessExecutor
    from cotenant.execute.worker.limits import WorkerLimits

    save_onnx(folder)
    executor = ProcessExecutor(3, limits or WorkerLimits())
    for tenant in ("cnn", "picky"):
        model = SegmentedModel.open(folder / f"{tenant}.onnx", cache_dir=folder / "graphs")
        executor.add_model(tenant, executor.load(tenant, model, LoadSpec((ONE,), (0, model.unit_count))))
    return executor


def process_case_of(executor: ProcessExecutor, folder: Path) -> Case:
    from cotenant.execute.onnx.segments import SegmentedModel

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
    """The world is given the launches that fail; queries get their own inputs back."""
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
        exact = Arithmetic("fp32")  # answers are compared with those of a CPU
        names = ("cnn", "picky")
        cnn, one = (TorchModel.open(folder / f"{name}.pt2", device=device.name, arithmetic=exact) for name in names)
        TORCH[folder, device.name] = cnn, one
    cnn, one = TORCH[folder, device.name]
    executor = TorchExecutor(device)
    cuts = tuple(range(cnn.unit_count + 1))
    executor.add_model("cnn", executor.load_shared(cnn, LoadSpec((ONE,), cuts, ({"x": (1, 3, 16, 16)},), max_batch=8)))
    executor.add_model("picky", executor.load_shared(one, LoadSpec((ONE,), (0, 1), ({"index": (1,)},), max_batch=8)))
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


class CoresAsShares:
    """Shares of a GPU for partitions that name cores: the first and the second half of it, or all."""

    def __init__(self, shares: GpuPartitioner) -> None:
        self._shares = shares
        half = shares.grid.groups // 2
        spans = {ONE: range(half), OTHER: range(half, 2 * half)}
        self._halves = {each: sm_ladder.partition_of(span, shares.grid, 0) for each, span in spans.items()}
        shares.split([*dict.fromkeys(self._halves.values()), sm_ladder.whole(shares.grid, 0)])

    def stream(self, partition: Share, urgent: bool = False) -> torch.cuda.Stream:
        return self._shares.stream(self._halves.get(partition) or sm_ladder.whole(self._shares.grid, 0), urgent)

    def close(self) -> None:
        self._shares.close()


@contextmanager
def torch_cuda_case(folder: Path, kind: type[PlainShares | GreenShares] = PlainShares) -> Iterator[Case]:
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    device = CudaStreams(0, cast(GpuPartitioner, CoresAsShares(kind.open(0))))
    with torch_case(folder, device, {"index": np.array([3.0])}) as made:  # a kernel that fails would end the device
        yield made


CASES = {
    "onnxruntime": onnxruntime_case,
    "processes": shared_process_case,
    "simulated": simulated_case,
    "contention": contention_case,
    "torch-cpu": torch_cpu_case,
    "torch-cuda": torch_cuda_case,
    "torch-cuda-green": partial(torch_cuda_case, kind=GreenShares),
}
ON_DEVICE = {"torch-cuda", "torch-cuda-green"}


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
        partition: Share = ONE,
        batch: int | None = None,
    ) -> int:
        number = self._count
        self._count += 1
        batch = number if batch is None else batch
        if span[0] == 0:
            self.items[batch] = sum(self._rows.get(query, 1) for query in queries)
        launch = Launch(number, batch, queries, Work(tenant, 0, self.items[batch], *span), last, partition, 1)
        self.case.executor.start(launch, self._ended)
        return number

    def whole(self, tenant: str, *queries: int, partition: Share = ONE) -> int:
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


def assert_equal(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)
