"""Shares of one GPU as green contexts on disjoint SMs; `sm_streams` has plain streams with the same methods.

A green context is a set of SMs of the primary context. Memory, modules and events are common to all contexts; only
kernels of its streams are limited to its SMs. A share needs one stream: no kernels of other shares compete in it.
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
from cotenant.execute.gpu.sm_streams import GpuPartitioner, PlainShares, check_device, unknown
from cotenant.work import Share

if TYPE_CHECKING:
    import torch

__all__ = ["GpuPartitioner", "GreenShares", "PlainShares", "open_shares"]

Wrap = Callable[[int, int], Any]
"""Makes a torch stream from the address of a stream and the number of its GPU."""


class _Share:
    """One green context, or the primary context (None), and its stream."""

    def __init__(self, context: Any, granted: int) -> None:
        self.context = context
        self.granted = granted
        self.stream: Any = None
        self.wrapped: Any = None


class GreenShares:
    """Shares of a GPU by green contexts over the groups of one split. Implements `GpuPartitioner`. Thread-safe.

    Contexts and streams live until `close`.
    """

    def __init__(self, driver: Any, index: int, wrap: Wrap) -> None:
        self._driver = driver
        self.index = index
        self._wrap = wrap
        self._lock = threading.Lock()
        self._device = device_of(driver, index)
        self.grid, self._groups = split_groups(driver, self._device)
        self._shares: dict[Share, _Share] = {}
        self._primary = call(driver, "cuDevicePrimaryCtxRetain", self._device)

    @classmethod
    def open(cls, index: int, driver: Any = None, wrap: Wrap | None = None) -> Self:
        """Split a GPU into its groups. Raises GpuError when the GPU is missing or has no green contexts."""
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

    def split(self, partitions: Sequence[Share]) -> int:
        """Make a context and a stream for each new partition; returns the duration in ns.

        Raises InvalidValueError for a partition that is not made of groups of this GPU. Raises GpuError when the driver
        refuses or the shares are closed; the partitions are then unchanged.
        """
        for partition in partitions:
            check_device(partition, self.index)
            if not is_whole(partition, self.grid):
                groups_of(partition, self.grid)
        began = time.perf_counter_ns()
        with self._lock:
            if self._primary is None:
                raise GpuError(f"the shares of cuda:{self.index} are closed")
            self._shares |= self._make_all([each for each in dict.fromkeys(partitions) if each not in self._shares])
        return time.perf_counter_ns() - began

    def stream(self, partition: Share, urgent: bool = False) -> torch.cuda.Stream:
        """The stream of a partition, the same for `urgent` launches.

        Raises InvalidValueError for a partition that was not passed to `split`.
        """
        with self._lock:
            share = self._shares.get(partition)
            if share is None:
                raise unknown(partition, len(self._shares))
            if share.wrapped is None:
                share.wrapped = self._wrap(int(share.stream), self.index)
            stream: torch.cuda.Stream = share.wrapped
            return stream

    def close(self) -> None:
        """Wait for launches under way, and destroy all contexts."""
        with self._lock:
            if self._primary is None:
                return
            shares, self._shares = self._shares, {}
            with suppress(GpuError), current(self._driver, self._primary):
                for share in shares.values():
                    with suppress(GpuError):  # after a failed kernel the stream cannot be waited for
                        call(self._driver, "cuStreamSynchronize", share.stream)
                    self._destroy(share)
            with suppress(GpuError):
                call(self._driver, "cuDevicePrimaryCtxRelease", self._device)
            self._primary = None

    def _make_all(self, partitions: Sequence[Share]) -> dict[Share, _Share]:
        """Make all of these, or none."""
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
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if is_whole(partition, self.grid):
            share = _Share(None, self.grid.total)
            with current(driver, self._primary):
                share.stream = call(driver, "cuStreamCreate", flags)
            return share
        groups = [self._groups[k] for k in groups_of(partition, self.grid)]
        description = call(driver, "cuDevResourceGenerateDesc", groups, len(groups))
        default = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        context = call(driver, "cuGreenCtxCreate", description, self._device, default)
        share = _Share(context, 0)
        try:
            kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            share.granted = int(call(driver, "cuGreenCtxGetDevResource", context, kind).sm.smCount)
            share.stream = call(driver, "cuGreenCtxStreamCreate", context, flags, 0)
        except GpuError:
            self._destroy(share)
            raise
        return share

    def _destroy(self, share: _Share) -> None:
        """Destroy the stream before its context: the driver does not destroy both together."""
        if share.stream is not None:
            with suppress(GpuError):
                call(self._driver, "cuStreamDestroy", share.stream)
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
