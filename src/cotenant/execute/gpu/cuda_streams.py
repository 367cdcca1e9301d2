"""CUDA streams inside shares of a GPU, as the torch executor uses them. Not yet run on hardware: docs/torch.md.

Copies are asynchronous over pinned memory, which torch caches. The only waits are those of the threads that wait for
events, which sleep in the driver (blocking events), and that for weights on their way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy.typing as npt
import torch

from cotenant.execute.gpu.sm_streams import GpuPartitioner
from cotenant.execute.gpu.streams import Captured, Event, Named, StreamLane, causes
from cotenant.work import Share

_NS_PER_MS = 1_000_000
_cuda: Any = torch.cuda  # its stubs leave out half of the types


class CudaStreams:
    """The GPU number `index` as a device with streams, divided by `shares`, which are split before lanes run.

    Closing it closes the shares.
    """

    has_graphs = True

    def __init__(self, index: int, shares: GpuPartitioner) -> None:
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)
        self._shares = shares
        self._capturing = threading.Lock()

    def lane(self, partition: Share) -> StreamLane:
        """See StreamDevice."""
        return _CudaLane(self._device, self._shares, partition, self._capturing)

    def synchronize(self) -> None:
        """See StreamDevice."""
        _cuda.current_stream(self._device).synchronize()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See StreamDevice."""
        return any(isinstance(each, torch.OutOfMemoryError) for each in causes(error))

    def is_lost(self, error: BaseException) -> bool:
        """See StreamDevice. After an error that ends a context, every later call of the driver fails: one is made."""
        if self.is_out_of_memory(error) or not any(isinstance(each, RuntimeError) for each in causes(error)):
            return False
        try:
            _cuda.mem_get_info(self._device)
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        """See StreamDevice."""
        self._shares.close()


class _CudaLane:
    threads: int | tuple[int, ...] = 1

    def __init__(
        self, device: torch.device, shares: GpuPartitioner, partition: Share, capturing: threading.Lock
    ) -> None:
        self._device = device
        self._shares = shares
        self._partition = partition
        self._capturing = capturing
        self._pools: dict[tuple[int, int], weakref.ref[_Pool]] = {}

    def settle(self) -> None:
        _cuda.set_device(self._device)

    def attend(self) -> None:
        _cuda.set_device(self._device)

    def stream(self, urgent: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _cuda.stream(self._shares.stream(self._partition, urgent))
        return context

    def record(self) -> Event:
        event = _cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return _CudaEvent(event)

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.host(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

    def to_numpy(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = tensor.numpy().copy()  # whoever drops pinned memory records events on our stream
        return array

    def capture(self, work: Callable[[], Named], owner: int) -> Captured:
        # Not `torch.cuda.graph`: it waits for the whole device, and with it for the work of every other lane.
        place = owner, int(_cuda.current_stream(self._device).cuda_stream)
        known = self._pools.get(place)
        pool = (known and known()) or _Pool()
        graph = _cuda.CUDAGraph()
        with self._capturing:  # torch knows one capture at a time
            try:
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                try:
                    outputs = work()
                except BaseException:
                    with suppress(RuntimeError):  # it says again that the capture failed
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                self._pools.pop(place, None)  # torch may keep the memory of a capture that failed: share it no more
                raise
        self._pools[place] = weakref.ref(pool)
        return _CudaGraph(graph, pool, outputs)


class _CudaEvent:
    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def ns_since(self, earlier: Any) -> int:
        ms: float = earlier.event.elapsed_time(self.event)
        return max(0, round(ms * _NS_PER_MS))


class _Pool:
    """Memory that the graphs of one model on one stream share, for as long as there is one of them.

    They never run at one time, and what each leaves in it is copied before the next one runs. The graphs of another
    model have their own, so that evicting a model gives its memory back.
    """

    def __init__(self) -> None:
        self.handle = _cuda.graph_pool_handle()


class _CudaGraph:
    def __init__(self, graph: Any, pool: _Pool, outputs: Named) -> None:
        self._graph = graph
        self._pool = pool
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()
