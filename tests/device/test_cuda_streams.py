"""What CudaStreams asks of torch.cuda, recorded instead of done; on hardware the conformance suite runs it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotenant.core.actions import Launch
from cotenant.execute.errors import ModelError
from cotenant.execute.gpu import cuda_streams
from cotenant.execute.gpu.cuda_streams import CudaStreams
from cotenant.execute.gpu.sm_ladder import whole
from cotenant.execute.gpu.sm_streams import PlainShares
from cotenant.execute.protocol import Timing
from cotenant.execute.torch.executor import TorchExecutor
from cotenant.execute.torch.model import TorchModel
from cotenant.work import Share, Work
from torch_small import save_small, small_cnn

PART = Share((0, 1), "cuda:0")


class Calls:
    """Stands for torch.cuda. `fails` names the calls that raise."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.fails: set[str] = set()
        self._handles = 0
        self.current: Any = None

    def _call(self, name: str, *values: Any) -> None:
        self.made.append((name, *values))
        if name in self.fails:
            raise RuntimeError(f"CUDA error in {name}")

    def set_device(self, device: Any) -> None:
        self._call("set_device", str(device))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, device: Any) -> Any:
        return self.current

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        self._call("mem_get_info", str(device))
        return 1, 2

    def graph_pool_handle(self) -> int:
        self._handles += 1
        return self._handles

    def CUDAGraph(self) -> Any:  # noqa: N802
        calls = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                calls._call("capture_begin", pool, capture_error_mode)

            def capture_end(self) -> None:
                calls._call("capture_end")

            def replay(self) -> None:
                calls._call("replay")

        return Graph()

    def Event(self, *, enable_timing: bool, blocking: bool) -> Any:  # noqa: N802
        calls = self
        calls._call("event", enable_timing, blocking)

        class Event:
            def record(self) -> None:
                calls._call("record", calls.current.name)

            def synchronize(self) -> None:
                calls._call("synchronize")

            def elapsed_time(self, end: Any) -> float:
                return 1.25

        return Event()


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.cuda_stream = hash(name)


class GpuPartitioner:
    def __init__(self) -> None:
        self.streams = {urgent: Stream("urgent" if urgent else "calm") for urgent in (False, True)}
        self.is_closed = False

    def stream(self, partition: Share, urgent: bool = False) -> Any:
        assert partition == PART
        return self.streams[urgent]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(cuda_streams, "_cuda", made)
    return made


def device(shares: Any = None) -> CudaStreams:
    return CudaStreams(0, shares or GpuPartitioner())


def output() -> dict[str, torch.Tensor]:
    return {"y": torch.zeros(1)}


def test_events_sleep_and_measure(calls: Calls) -> None:
    lane = device().lane(PART)
    lane.settle()
    with lane.stream(True):
        first, second = lane.record(), lane.record()
    second.wait()
    assert second.ns_since(first) == 1_250_000
    assert calls.made == [
        ("set_device", "cuda:0"),
        *[("event", True, True), ("record", "urgent")] * 2,
        ("synchronize",),
    ]


def test_a_capture_is_of_one_thread_and_waits_for_nothing(calls: Calls) -> None:
    lane = device().lane(PART)
    with lane.stream(False):
        graph = lane.capture(output, 1)
    graph.replay()
    assert calls.made == [("capture_begin", 1, "thread_local"), ("capture_end",), ("replay",)]
    assert list(graph.outputs) == ["y"]


def test_graphs_of_one_model_on_one_stream_share_memory_while_there_are_some(calls: Calls) -> None:
    lane = device().lane(PART)
    with lane.stream(False):
        kept = [lane.capture(output, 1), lane.capture(output, 1)]
        other = lane.capture(output, 2)
    with lane.stream(True):
        urgent = lane.capture(output, 1)
    kept.clear()
    with lane.stream(False):
        lane.capture(output, 1)
    assert [made[1] for made in calls.made if made[0] == "capture_begin"] == [1, 1, 2, 3, 4]
    assert other is not urgent


@pytest.mark.parametrize("fails", ["work", "capture_begin", "capture_end"])
def test_a_capture_that_fails_is_ended_and_its_memory_shared_no_more(calls: Calls, fails: str) -> None:
    lane = device().lane(PART)

    def raises() -> dict[str, torch.Tensor]:
        raise ValueError("not permitted while capturing")

    with lane.stream(False):
        kept = lane.capture(output, 1)
        calls.fails = {fails}
        with pytest.raises(ValueError if fails == "work" else RuntimeError):
            lane.capture(raises if fails == "work" else output, 1)
        calls.fails = set()
        again = lane.capture(output, 1)
    assert kept is not again
    assert [made[1] for made in calls.made if made[0] == "capture_begin"] == [1, 1, 2]
    begun = [made[0] for made in calls.made].count("capture_begin") - (fails == "capture_begin")
    assert [made[0] for made in calls.made].count("capture_end") == begun


def test_a_lost_device_is_told_from_a_failed_launch(calls: Calls) -> None:
    gpu = device()
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not gpu.is_lost(error)
    calls.fails = {"mem_get_info"}
    assert gpu.is_lost(error)
    assert not gpu.is_lost(ValueError("an input does not fit"))
    assert not gpu.is_lost(torch.OutOfMemoryError("CUDA out of memory"))


def test_running_out_of_memory_is_seen_below_other_errors(calls: Calls) -> None:
    wrapped = ModelError(Path("m"), "units 0 to 1 failed", "")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert device().is_out_of_memory(wrapped)
    assert not device().is_out_of_memory(RuntimeError("CUDA error"))


def test_closing_the_device_closes_its_shares(calls: Calls) -> None:
    shares = GpuPartitioner()
    device(shares).close()
    assert shares.is_closed


def test_this_torch_has_what_is_called() -> None:
    begin = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= set(begin)
    assert {"enable_timing", "blocking"} <= set(inspect.signature(torch.cuda.Event.__new__).parameters)
    for name in ("set_device", "stream", "current_stream", "mem_get_info", "graph_pool_handle"):
        assert callable(getattr(torch.cuda, name))


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no CUDA device")
@pytest.mark.parametrize("graphs", [0, 8])
def test_on_hardware_launches_answer_without_waiting_for_the_device(tmp_path: Path, graphs: int) -> None:
    """The second half runs while torch makes an error of every wait of the host that it knows of."""
    save_small(tmp_path)
    shares = PlainShares.open(0)
    lane = whole(shares.grid, 0)
    shares.split([lane])
    executor = TorchExecutor(CudaStreams(0, shares), graphs=graphs)
    model = TorchModel.open(tmp_path / "cnn.pt2")
    spans = [(0, 3), (3, model.unit_count)]
    executor.add_model("cnn", executor.load("cnn", model, [(1, spans)]), urgent=True)
    reference = small_cnn()
    ended = threading.Semaphore(0)
    errors: list[str | None] = []

    def end(_: int, error: str | None, __: Timing) -> None:
        errors.append(error)
        ended.release()

    try:
        for query in range(8):
            if query == 4:
                torch.cuda.set_sync_debug_mode("error")
            image = np.random.default_rng(query).standard_normal((2, 3, 16, 16)).astype(np.float32)
            executor.put(query, {"x": image})
            for number, span in enumerate(spans):
                launch = Launch(2 * query + number, query, (query,), Work("cnn", 0, 2, *span), number == 1, lane, 1, 1)
                executor.start(launch, end)
                assert ended.acquire(timeout=60)
                assert errors[-1] is None
            (got,) = executor.take(query).values()
            with torch.inference_mode():
                expected = reference(torch.from_numpy(image)).numpy()
            np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2)  # TF32 convolutions
    finally:
        torch.cuda.set_sync_debug_mode("default")
        executor.close()
        model.close()
    assert executor.graph_counts.captured == (2 if graphs else 0)
