"""Shares of one GPU as green contexts on disjoint SMs; `sm_streams` has the plain streams with the same surface.

A green context is a set of SMs of the primary context: memory, modules and events are common to all, and only the
kernels of its streams are bound to its SMs. That makes a new division cheap: no process starts, no model moves.
Source: CUDA driver API, "Green Contexts".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from cotenant.execute.gpu.cuda_driver import GpuError, call, current, device_of, load_driver, start
from cotenant.execute.gpu.sm_groups import split_groups
from cotenant.execute.gpu.sm_ladder import groups_of, is_whole
from cotenant.execute.gpu.sm_streams import GpuPartitioner, OnGrid, PlainShares, check_device, unknown
from cotenant.work import Share

if TYPE_CHECKING:
    import torch

__all__ = ["GpuPartitioner", "GreenShares", "PlainShares", "open_shares"]

Wrap = Callable[[int, int], Any]
"""From the address of a stream and the number of its GPU to a torch stream."""


class _Share:
    """One green context, or the primary one (None), and its streams by urgency."""

    def __init__(self, context: Any, granted: int) -> None:
        self.context = context
        self.granted = granted
        self.streams: dict[bool, Any] = {}
        self.wrapped: dict[bool, Any] = {}


class GreenShares(OnGrid):
    """Shares of a GPU by green contexts over the groups of one split. Implements `GpuPartitioner`.

    Usable from any thread. `split` destroys contexts that are needed no more as soon as they are idle. So nobody may be
    about to launch in a partition that goes, its streams must not be used again, nor what was captured on them.
    """

    def __init__(self, driver: Any, index: int, wrap: Wrap) -> None:
        self._driver = driver
        self.index = index
        self._wrap = wrap
        self._lock = threading.Lock()
        self._splitting = threading.Lock()  # taken before the other one
        self._device = device_of(driver, index)
        self.grid, self._groups = split_groups(driver, self._device)
        self._shares: dict[Share, _Share] = {}
        self._retired: list[_Share] = []
        self._primary = call(driver, "cuDevicePrimaryCtxRetain", self._device)
        try:
            with current(driver, self._primary):
                self._priorities = tuple(map(int, call(driver, "cuCtxGetStreamPriorityRange")))
        except GpuError:
            self.close()
            raise

    @classmethod
    def open(cls, index: int, driver: Any = None, wrap: Wrap | None = None) -> Self:
        """Split a GPU into its groups. Raises GpuError when there is no such GPU, or it has no green contexts."""
        if driver is None:
            driver = load_driver()
        else:
            start(driver)
        return cls(driver, index, wrap or _external_stream)

    @property
    def granted(self) -> Mapping[Share, int]:
        """SMs of each partition, read back from its context."""
        with self._lock:
            return MappingProxyType({partition: share.granted for partition, share in self._shares.items()})

    @property
    def retired(self) -> int:
        """How many contexts wait for their work to end before they are destroyed."""
        return len(self._retired)

    def split(self, partitions: Sequence[Share]) -> int:
        """Have a context for each of these partitions and for no other; gives the nanoseconds it took.

        What stays keeps its context and streams. Raises InvalidValueError for a partition that is not made of groups of
        this GPU, GpuError when the driver refuses or the shares are closed; the division is then the one it was.
        """
        for partition in partitions:
            check_device(partition, self.index)
            if not is_whole(partition, self.grid):
                groups_of(partition, self.grid)
        began = time.perf_counter_ns()
        with self._splitting:
            if self._primary is None:
                raise GpuError(f"the shares of cuda:{self.index} are closed")
            made = self._make_all([each for each in dict.fromkeys(partitions) if each not in self._shares])
            now = {each: self._shares.get(each) or made[each] for each in partitions}
            retired = [*self._retired, *(share for each, share in self._shares.items() if each not in now)]
            with self._lock:  # for a moment: lanes that stay ask for their streams meanwhile
                self._shares = now
            with current(self._driver, self._primary):
                self._retired = [share for share in retired if not self._destroy_if_idle(share)]
        return time.perf_counter_ns() - began

    def stream(self, partition: Share, urgent: bool = False) -> torch.cuda.Stream:
        """A stream of a partition, of the greatest priority when `urgent`; the same one each time.

        Raises InvalidValueError for a partition that is not in the division.
        """
        with self._lock:
            share = self._share(partition)
            if urgent not in share.wrapped:
                share.wrapped[urgent] = self._wrap(int(self._stream(share, urgent)), self.index)
            stream: torch.cuda.Stream = share.wrapped[urgent]
            return stream

    def handle(self, partition: Share, urgent: bool = False) -> int:
        """The address of `stream`; needs no torch."""
        with self._lock:
            return int(self._stream(self._share(partition), urgent))

    def close(self) -> None:
        """Wait for what runs, and destroy all contexts."""
        with self._splitting, self._lock:
            if self._primary is None:
                return
            shares = [*self._shares.values(), *self._retired]
            self._shares, self._retired = {}, []
            with suppress(GpuError), current(self._driver, self._primary):
                for share in shares:
                    for stream in share.streams.values():
                        with suppress(GpuError):  # after a kernel that failed there is nothing to wait for
                            call(self._driver, "cuStreamSynchronize", stream)
                    self._destroy(share)
            with suppress(GpuError):
                call(self._driver, "cuDevicePrimaryCtxRelease", self._device)
            self._primary = None

    def _share(self, partition: Share) -> _Share:
        share = self._shares.get(partition)
        if share is None:
            raise unknown(partition, len(self._shares))
        return share

    def _make_all(self, partitions: Sequence[Share]) -> dict[Share, _Share]:
        """All of these, or none."""
        made: dict[Share, _Share] = {}
        try:
            for partition in partitions:
                made[partition] = self._make(partition)
        except GpuError:
            for share in made.values():
                self._destroy(share)
            raise
        return made

    def _make(self, partition: Share) -> _Share:
        driver = self._driver
        if is_whole(partition, self.grid):
            return _Share(None, self.grid.total)
        groups = [self._groups[k] for k in groups_of(partition, self.grid)]
        description = call(driver, "cuDevResourceGenerateDesc", groups, len(groups))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call(driver, "cuGreenCtxCreate", description, self._device, int(flags))
        share = _Share(context, 0)
        try:
            kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            share.granted = int(call(driver, "cuGreenCtxGetDevResource", context, kind).sm.smCount)
        except GpuError:
            self._destroy(share)
            raise
        return share

    def _stream(self, share: _Share, urgent: bool) -> Any:
        if urgent not in share.streams:
            driver = self._driver
            flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            priority = self._priorities[1] if urgent else self._priorities[0]
            if share.context is None:
                with current(driver, self._primary):
                    made = call(driver, "cuStreamCreateWithPriority", flags, priority)
            else:
                made = call(driver, "cuGreenCtxStreamCreate", share.context, flags, priority)
            share.streams[urgent] = made
        return share.streams[urgent]

    def _destroy_if_idle(self, share: _Share) -> bool:
        for stream in share.streams.values():
            if int(self._driver.cuStreamQuery(stream)[0]):  # work is under way, or the device has failed
                return False
        self._destroy(share)
        return True

    def _destroy(self, share: _Share) -> None:
        """Streams first: the driver does not destroy them with their context."""
        for stream in share.streams.values():
            with suppress(GpuError):
                call(self._driver, "cuStreamDestroy", stream)
        if share.context is not None:
            with suppress(GpuError):
                call(self._driver, "cuGreenCtxDestroy", share.context)


def open_shares(index: int, sharing: str) -> GpuPartitioner:
    """Shares of a GPU by `device.sharing`. Raises GpuError."""
    return GreenShares.open(index) if sharing == "green" else PlainShares.open(index)


def _external_stream(address: int, index: int) -> Any:
    import torch

    external: Any = torch.cuda.ExternalStream
    return external(address, device=torch.device("cuda", index))
