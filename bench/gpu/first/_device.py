"""The GPU as the first scripts use it, and the cores of this machine behind the same calls, for trial runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch

from cotenant.execute.gpu.sm_ladder import partition_of, whole
from cotenant.execute.gpu.sm_shares import GreenShares
from cotenant.execute.gpu.sm_streams import plain_stream
from cotenant.work import Share

Work = Callable[[], Any]
Part = tuple[Share, int, Any]
_cuda: Any = torch.cuda  # its stubs leave out half of the types


class _Now:
    """A mark of a CPU: all work submitted before it has run."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self.synchronize = lambda: None
        self.elapsed_time = lambda later: 1e3 * (later._at - self._at)


class Cpu:
    """Cores: there are no streams and no graphs, captured work is called again, and a share is a single thread."""

    name = "cpu"
    is_gpu = False
    mark = _Now

    def __init__(self) -> None:
        self.settle = self.trim = self.sync = lambda: None

    def put(self, array: Any) -> Any:
        return _laid_out(torch.from_numpy(array))

    def stream(self, urgent: bool = False) -> Any:
        return None

    def on(self, stream: Any) -> Any:
        return nullcontext()

    def parts(self, spans: Sequence[tuple[int, int]] = ()) -> list[Part]:
        return [(Share((at,), self.name), 1, None) for at in range(len(spans) or 2)]

    def capture(self, work: Work, stream: Any) -> Work:
        return work


class Cuda:
    """The first GPU. Streams are plain, or of green contexts; matrix products have TF32, as convolutions have it."""

    name = "cuda:0"
    is_gpu = True

    def __init__(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        self.settle = partial(_cuda.set_device, 0)
        """Makes the calling thread one that submits."""
        self.sync = _cuda.synchronize
        self.settle()
        torch.empty(1, device=self.name)  # makes the primary context, which all shares belong to
        self.total: int = _cuda.get_device_properties(0).total_memory
        self.shares: Any = None
        self._broken: list[Any] = []
        self._told = False
        self.left_open = 0
        """Captures that failed and that torch's allocator was still in."""

    def put(self, array: Any) -> Any:
        """An array as a tensor on the device, for every stream: the copy has ended."""
        tensor = _laid_out(torch.from_numpy(array).to(self.name))
        self.sync()
        return tensor

    def mark(self) -> Any:
        """An event with a time at the end of the current stream."""
        event = _cuda.Event(enable_timing=True)
        event.record()
        return event

    def stream(self, urgent: bool = False) -> Any:
        """A stream of the whole device, of the greatest priority when `urgent`."""
        return plain_stream(0, urgent)

    def on(self, stream: Any) -> Any:
        """What the calling thread submits inside goes to this stream."""
        return _cuda.stream(stream)

    def parts(self, spans: Sequence[tuple[int, int]] = ()) -> list[Part]:
        """Divide the SMs by ranges of groups, by default two halves: shares, SMs granted, and a stream of each.

        An end of 0 stands for the whole device, one beyond the last group for the last group. Ranges may overlap, and
        those that come to the same are one. An earlier division's shares are gone unless they are among these.
        Raises GpuError.
        """
        self.shares = self.shares or GreenShares.open(0)
        grid, half = self.shares.grid, self.shares.grid.groups // 2
        spans = spans or ((0, half), (half, 2 * half))
        made = [
            partition_of(range(start, min(end, grid.groups)), grid, 0) if end else whole(grid, 0)
            for start, end in spans
        ]
        made = list(dict.fromkeys(made))
        self.split_ns = self.shares.split(made)
        return [(each, self.shares.granted[each], self.shares.stream(each)) for each in made]

    def capture(self, work: Work, stream: Any) -> Work:
        """Record work on a stream, after three runs there, with memory of its own; calling it submits a replay.

        Raises what torch raises; the stream can be used afterwards.
        """
        with torch.inference_mode(), self.on(stream):
            for _ in range(3):
                work()
            stream.synchronize()
            graph, pool = _cuda.CUDAGraph(), _cuda.graph_pool_handle()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = work()
                graph.capture_end()
            except BaseException:
                # torch 2.11 leaves a capture that CUDA invalidated open in its allocator: ended here, and never freed
                self._broken.append(graph)
                with suppress(RuntimeError):
                    graph.capture_end()
                with suppress(RuntimeError):  # it had ended it itself
                    torch._C._cuda_endAllocateToPool(0, pool)
                    self.left_open += 1
                raise

        return lambda: (graph.replay(), outputs, work)[:2]  # the graph reads what `work` holds: it must not go

    def trim(self) -> None:
        """Give back what graphs that are gone have left, before memory is short."""
        if _cuda.memory_reserved() < self.total * 0.6:
            return
        try:
            _cuda.synchronize()
            _cuda.empty_cache()
        except RuntimeError as error:
            if not self._told:
                print(f"memory is not given back any more: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            self._told = True


def _laid_out(tensor: Any) -> Any:
    is_picture = tensor.dim() == 4 and tensor.dtype == torch.float16
    return tensor.to(memory_format=torch.channels_last) if is_picture else tensor
