"""CUDA streams in shares of a GPU, for the torch executor. See docs/gpu.md for the state of tests on hardware.

Copies are asynchronous over pinned memory, which torch caches. No method waits for the device.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from cotenant.execute.gpu.sm_streams import GpuPartitioner
from cotenant.execute.gpu.streams import Event, Named, Replay, StreamLane, causes
from cotenant.execute.torch.arrays import array_of, tensor_of
from cotenant.work import Share

_NS_PER_MS = 1_000_000
_SHORT = 4
"""Memory is short when less than 1 / _SHORT of it is free: captures cannot use memory that torch caches."""
_CYCLES_PER_NS = 2
"""Clock of a GPU, rounded up: keeping a stream busy for too long costs nothing."""
_cuda: Any = torch.cuda  # its stubs leave out half of the types
_log = logging.getLogger("cotenant.torch")


class CudaStreams:
    """The GPU number `index` as a device with streams. `shares` divides it, and is split before lanes run.

    `close` closes the shares. After a capture that CUDA invalidated, torch's allocator is in an unknown state, so
    nothing is captured any more.
    """

    timed_every = 16
    """A timed event costs the device some microseconds, and reading the time between two events costs the host."""

    def __init__(self, index: int, shares: GpuPartitioner) -> None:
        self.name = f"cuda:{index}"
        self.why_no_graphs = ""
        self.device = torch.device("cuda", index)
        self.shares = shares
        self.capturing = threading.Lock()
        """torch supports one capture at a time, and frees no memory meanwhile."""
        self.kept: list[Any] = []
        """Graphs of failed captures, which must not be freed: see `abandon_graphs` and `Chains.drop`."""

    def lane(self, share: Share) -> StreamLane:
        """The CUDA streams of a share."""
        return _CudaLane(self, share)

    def room(self) -> tuple[int, int]:
        """Free and total bytes. If memory is short, frees torch's cache first, which waits for the whole device."""
        free, total = _cuda.mem_get_info(self.device)
        if free < total // _SHORT:
            with self.capturing, suppress(RuntimeError):  # torch 2.11 refuses after an invalidated capture
                _cuda.empty_cache()
            free, total = _cuda.mem_get_info(self.device)
        return int(free), int(total)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether torch.OutOfMemoryError is among the causes."""
        return any(isinstance(each, torch.OutOfMemoryError) for each in causes(error))

    def is_lost(self, error: BaseException) -> bool:
        """Whether the context is lost, found by another call of the driver: after such an error every call fails."""
        if self.is_out_of_memory(error) or not any(isinstance(each, RuntimeError) for each in causes(error)):
            return False
        try:
            _cuda.mem_get_info(self.device)
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        """Close the shares."""
        self.shares.close()

    def abandon_graphs(self, graph: Any, pool: Any, reason: str) -> None:
        """Keep the graph of a capture that failed at its end, and stop capturing if CUDA invalidated the capture.

        If the pool was already left, CUDA only refused this graph (e.g. a cluster of blocks too large for a share).
        Otherwise torch 2.11 leaves its allocator inside the capture, with a pointer to the graph. This call ends that.
        """
        self.kept.append(graph)
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
        except RuntimeError:
            return
        self.why_no_graphs = f"a capture was invalidated: {reason}"
        _log.error("%s: CUDA graphs are off until the server is restarted: %s", self.name, reason)


class _CudaLane:
    threads: int | tuple[int, ...] = 1

    def __init__(self, device: CudaStreams, share: Share) -> None:
        self._home = device
        self._device = device.device
        self._share = share
        self._stream: Any = None
        self._copies: dict[bool, Any] = {}
        """Streams for copies, by direction (True: to the device). Made on demand: each takes a queue of the device."""
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()
        """Graphs in the pool. After the last one is freed, torch allows no other capture in the pool."""

    def settle(self) -> None:
        _cuda.set_device(self._device)
        self._stream = self._home.shares.stream(self._share)
        _cuda.set_stream(self._stream)

    def stream(self, urgent: bool) -> AbstractContextManager[Any]:
        wanted = self._home.shares.stream(self._share, urgent) if urgent else self._stream
        if wanted is self._stream:
            return nullcontext()
        context: AbstractContextManager[Any] = _cuda.stream(wanted)
        return context

    def crossing(self, up: bool) -> AbstractContextManager[Any]:
        if up not in self._copies:
            self._copies[up] = _cuda.Stream(self._device)
        context: AbstractContextManager[Any] = _cuda.stream(self._copies[up])
        return context

    def record(self, timed: bool = False) -> Event:
        event = _cuda.Event(enable_timing=timed)
        event.record()
        return _CudaEvent(event)

    def follow(self, event: Any) -> None:
        event.event.wait()

    def hold(self, ns: int) -> None:
        _cuda._sleep(ns * _CYCLES_PER_NS)

    def gather(self, arrays: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        first = arrays[0]
        shape = first.shape if len(arrays) == 1 else (sum(map(len, arrays)), *first.shape[1:])
        made = torch.empty(shape, dtype=tensor_of(np.empty(0, first.dtype)).dtype, pin_memory=True)
        view = array_of(made)
        if len(arrays) == 1:
            np.copyto(view, first)
        else:
            np.concatenate(arrays, out=view)
        return made

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True) if into is None else into.copy_(tensor, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return there.copy_(tensor, non_blocking=True)

    def to_numpy(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = array_of(tensor).copy()  # freeing pinned memory records events on our stream
        return array

    def capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
        # Not `torch.cuda.graph`: it waits for the whole device, that is for the work of all other lanes.
        graph = _cuda.CUDAGraph()
        with self._home.capturing, _without_collecting():
            if not self._graphs:
                self._pool = _cuda.graph_pool_handle()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._graphs.add(graph)
            try:
                outputs = work()
            except BaseException as error:
                self._end(graph, error)
                raise
            try:
                graph.capture_end()
            except BaseException as error:
                self._invalidate(graph, error)
                raise
        return graph.replay, outputs

    def unowned(self, tensors: Named) -> Named:
        return {name: _unowned(tensor) for name, tensor in tensors.items()}

    def _end(self, graph: Any, error: BaseException) -> None:
        """End a capture after an exception in its work. If CUDA accepts that, only this work has failed."""
        try:
            graph.capture_end()
            self._home.kept.append(graph)
        except BaseException:  # raised again: the capture was invalidated
            self._invalidate(graph, error)

    def _invalidate(self, graph: Any, error: BaseException) -> None:
        self._home.abandon_graphs(graph, self._pool, str(error).partition("\n")[0] or type(error).__name__)


class _CudaEvent:
    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_reached(self) -> bool:
        reached: bool = self.event.query()
        return reached

    def ns_since(self, earlier: Any) -> int:
        ms: float = earlier.event.elapsed_time(self.event)
        return max(0, round(ms * _NS_PER_MS))


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable garbage collection: objects of the device that it frees during a capture would be part of the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor's memory that does not keep the memory allocated."""
    store = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(store.data_ptr(), tensor.device, store.nbytes())
    made: torch.Tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())
