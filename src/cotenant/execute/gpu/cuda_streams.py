"""CUDA streams inside shares of a GPU, as the torch executor uses them. Not yet run on hardware: docs/gpu.md.

Copies are asynchronous over pinned memory, which torch caches. Nothing here waits for the device.
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
"""Memory is short when less than this part of it is free: captured work cannot have what torch keeps for other work."""
_CYCLES_PER_NS = 2
"""Of a GPU's clock, about, and rather too many: a stream that is held too long costs nothing."""
_cuda: Any = torch.cuda  # its stubs leave out half of the types
_log = logging.getLogger("cotenant.torch")


class CudaStreams:
    """The GPU number `index` as a device with streams, divided by `shares`, which are split before lanes run.

    Closing it closes the shares. What a capture that CUDA invalidates leaves behind in torch is not to be trusted:
    there is none after it.
    """

    timed_every = 16
    """Recording a timed event costs the device some microseconds, and asking for the time between two the host."""

    def __init__(self, index: int, shares: GpuPartitioner) -> None:
        self.name = f"cuda:{index}"
        self.why_no_graphs = ""
        self.device = torch.device("cuda", index)
        self.shares = shares
        self.capturing = threading.Lock()
        """torch knows one capture at a time, and gives no memory back meanwhile."""
        self.kept: list[Any] = []
        """Graphs of captures that failed, which must not go: see `give_up_graphs`, and `Chains.drop`."""

    def lane(self, share: Share) -> StreamLane:
        """See StreamDevice."""
        return _CudaLane(self, share)

    def room(self) -> tuple[int, int]:
        """See StreamDevice. Giving back waits for the whole device: it is done where memory is short."""
        free, total = _cuda.mem_get_info(self.device)
        if free < total // _SHORT:
            with self.capturing, suppress(RuntimeError):  # torch 2.11 refuses after one that was invalidated
                _cuda.empty_cache()
            free, total = _cuda.mem_get_info(self.device)
        return int(free), int(total)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See StreamDevice."""
        return any(isinstance(each, torch.OutOfMemoryError) for each in causes(error))

    def is_lost(self, error: BaseException) -> bool:
        """See StreamDevice. After an error that ends a context, every later call of the driver fails: one is made."""
        if self.is_out_of_memory(error) or not any(isinstance(each, RuntimeError) for each in causes(error)):
            return False
        try:
            _cuda.mem_get_info(self.device)
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        """See StreamDevice."""
        self.shares.close()

    def give_up_graphs(self, graph: Any, pool: Any, reason: str) -> None:
        """A capture has failed at its end, and its graph is kept. Where the end got so far as to leave the pool, no
        other capture is concerned: CUDA refused this graph (a cluster of blocks that does not fit into a share,
        say). Else CUDA invalidated the capture, and torch 2.11 leaves its allocator in the state of a capture under
        way, with a pointer to the graph: this ends that, and nothing is captured any more.
        """
        self.kept.append(graph)
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
        except RuntimeError:
            return
        self.why_no_graphs = f"a capture was invalidated: {reason}"
        _log.error("%s: nothing is captured any more until the server is restarted: %s", self.name, reason)


class _CudaLane:
    threads: int | tuple[int, ...] = 1

    def __init__(self, device: CudaStreams, share: Share) -> None:
        self._home = device
        self._device = device.device
        self._share = share
        self._stream: Any = None
        self._copies: dict[bool, Any] = {}
        """Streams of copies, by whether they go up; made where they are needed: each takes a queue of the device."""
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()
        """Those that use the pool: when the last one is gone, torch lets no other capture have it."""

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
        array: npt.NDArray[Any] = array_of(tensor).copy()  # whoever drops pinned memory records events on our stream
        return array

    def capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
        # Not `torch.cuda.graph`: it waits for the whole device, and with it for the work of every other lane.
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

    def lend(self, tensors: Named) -> Named:
        return {name: _lent(tensor) for name, tensor in tensors.items()}

    def _end(self, graph: Any, error: BaseException) -> None:
        """End a capture whose work raised. CUDA may not mind: then nothing is amiss but this work."""
        try:
            graph.capture_end()
            self._home.kept.append(graph)
        except BaseException:  # it says again that the capture was invalidated
            self._invalidate(graph, error)

    def _invalidate(self, graph: Any, error: BaseException) -> None:
        self._home.give_up_graphs(graph, self._pool, str(error).partition("\n")[0] or type(error).__name__)


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
    """Graphs and pinned memory that go while the calling thread captures would be part of the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that is not told when that is given to somebody else."""
    store = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(store.data_ptr(), tensor.device, store.nbytes())
    made: torch.Tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())
