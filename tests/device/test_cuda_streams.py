"""What CudaStreams asks of torch.cuda, recorded instead of done; on hardware the conformance suite runs it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cotenant.execute.errors import ModelError
from cotenant.execute.gpu import cuda_streams
from cotenant.execute.gpu.cuda_streams import CudaStreams
from cotenant.work import Share

PART = Share((0, 1), "cuda:0")


class Calls:
    """Stands for torch.cuda. `fails` names the calls that raise."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.fails: set[str] = set()
        self.free = 1
        self._handles = 0

    def call(self, name: str, *values: Any) -> None:
        self.made.append((name, *values))
        if name in self.fails:
            raise RuntimeError(f"CUDA error in {name}\nadvice")

    def set_device(self, device: Any) -> None:
        self.call("set_device", str(device))

    def set_stream(self, stream: Any) -> None:
        self.call("set_stream", stream.name)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.call("stream", stream.name)
        yield

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        self.call("mem_get_info", str(device))
        return self.free, 8

    def empty_cache(self) -> None:
        self.call("empty_cache")

    def graph_pool_handle(self) -> int:
        self._handles += 1
        return self._handles

    def CUDAGraph(self) -> Any:  # noqa: N802
        calls = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                calls.call("capture_begin", pool, capture_error_mode)

            def capture_end(self) -> None:
                calls.call("capture_end")

            def replay(self) -> None:
                calls.call("replay")

        return Graph()


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
    end = partial(made.call, "end_allocate")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    return made


def device(shares: Any = None) -> CudaStreams:
    return CudaStreams(0, shares or GpuPartitioner())


def output() -> dict[str, torch.Tensor]:
    return {"y": torch.zeros(1)}


def raises() -> dict[str, torch.Tensor]:
    raise ValueError("an error of the model")


def test_a_lane_has_one_stream_and_an_urgent_one_where_that_is_another(calls: Calls) -> None:
    shares = GpuPartitioner()
    lane = device(shares).lane(PART)
    lane.settle()
    with lane.stream(False):
        calls.call("calm work")
    with lane.stream(True):
        calls.call("urgent work")
    shares.streams[True] = shares.streams[False]
    with lane.stream(True):
        calls.call("urgent work")
    names = [" ".join(each) for each in calls.made]
    assert names[:2] == ["set_device cuda:0", "set_stream calm"]
    assert names[2:] == ["calm work", "stream urgent", "urgent work", "urgent work"]


def test_captures_of_a_lane_are_of_one_thread_and_share_memory(calls: Calls) -> None:
    gpu = device()
    lane, other = gpu.lane(PART), gpu.lane(PART)
    graphs = [lane.capture(output), lane.capture(output), other.capture(output)]
    replay, outputs = graphs[0]
    replay()
    assert [made[1:] for made in calls.made if made[0] == "capture_begin"] == [(at, "thread_local") for at in (1, 1, 2)]
    assert calls.made[-1] == ("replay",)
    assert list(outputs) == ["y"]
    del graphs, replay
    lane.capture(output)  # torch lets nobody have the memory of graphs that are all gone
    assert calls.made[-2] == ("capture_begin", 3, "thread_local")


def test_work_that_raises_spoils_no_other_capture(calls: Calls) -> None:
    gpu = device()
    lane = gpu.lane(PART)
    with pytest.raises(ValueError, match="of the model"):
        lane.capture(raises)
    lane.capture(output)
    assert [made[1] for made in calls.made if made[0] == "capture_begin"] == [1, 1]
    assert gpu.why_no_graphs == ""


@pytest.mark.parametrize("work", ["output", "raises"])
def test_nothing_is_captured_after_an_invalidated_capture_and_its_allocation_is_ended(
    calls: Calls, work: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = device()
    lane = gpu.lane(PART)
    before = lane.capture(output)
    calls.fails = {"capture_end", "empty_cache"}
    with pytest.raises(RuntimeError if work == "output" else ValueError):
        lane.capture(output if work == "output" else raises)
    assert ("end_allocate", 0, 1) in calls.made, before
    said = "CUDA error in capture_end" if work == "output" else "an error of the model"
    assert gpu.why_no_graphs == f"a capture was invalidated: {said}"
    assert "CUDA graphs are off" in caplog.text
    assert gpu.room() == (1, 8)  # torch may refuse to give back what it keeps


@pytest.mark.parametrize("work", ["output", "raises"])
def test_a_graph_that_is_refused_after_the_pool_was_left_spoils_no_other(calls: Calls, work: str) -> None:
    """As kernels with clusters of blocks are in a share that is too small for them."""
    gpu = device()
    lane = gpu.lane(PART)
    calls.fails = {"capture_end", "end_allocate"}
    with pytest.raises(RuntimeError if work == "output" else ValueError):
        lane.capture(output if work == "output" else raises)
    assert gpu.why_no_graphs == ""
    calls.fails = set()
    replay, _ = lane.capture(output)
    replay()
    assert calls.made[-1] == ("replay",)


def test_memory_is_given_back_where_it_is_short(calls: Calls) -> None:
    gpu = device()
    for free in (1, 2):
        calls.free = free
        assert gpu.room() == (free, 8)
    assert [made[0] for made in calls.made].count("empty_cache") == 1


def test_lent_tensors_have_the_memory_and_do_not_hold_it() -> None:
    base = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    tensors = {"whole": base, "part": base[1:3, ::2]}
    lent = device().lane(PART).unowned(tensors)
    lent["whole"].add_(1)
    for name, tensor in tensors.items():
        assert torch.equal(lent[name], tensor)
        assert lent[name].stride() == tensor.stride()
    freed = weakref.ref(base.untyped_storage())
    del base, tensors, tensor
    assert freed() is None


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
    for name in ("set_device", "set_stream", "stream", "empty_cache", "mem_get_info", "graph_pool_handle", "_sleep"):
        assert callable(getattr(torch.cuda, name))
    for name in ("_cuda_endAllocateToPool", "_construct_storage_from_data_pointer"):
        assert hasattr(torch._C, name)
