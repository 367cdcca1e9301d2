"""On which SMs the kernels of each share really run: a kernel that reads the number of its SM, run in every share.

The kernel is PTX, which every driver compiles for its GPU without a separate compiler. Each of its blocks takes half an
SM and stays for a while. So the blocks of one launch spread over all SMs that they may use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from cotenant.execute.gpu.cuda_driver import call, capability_of, current, device_of, load_driver
from cotenant.execute.gpu.sm_streams import GpuPartitioner
from cotenant.work import Share

KERNEL = "mark_sm"
PTX = """
.version 7.0
.target sm_75
.address_size 64

// Adds 1 to seen[number of the SM] for each block, and holds the SM for stay_ns.
.visible .entry mark_sm(.param .u64 seen, .param .u32 length, .param .u64 stay_ns)
{
    .reg .pred other_thread, outside, early;
    .reg .b32 thread, sm, count;
    .reg .b64 base, offset, until, now;

    mov.u32 thread, %tid.x;
    setp.ne.u32 other_thread, thread, 0;
    @other_thread bra STAY;
    mov.u32 sm, %smid;
    ld.param.u32 count, [length];
    setp.ge.u32 outside, sm, count;
    @outside bra STAY;
    ld.param.u64 base, [seen];
    cvta.to.global.u64 base, base;
    mul.wide.u32 offset, sm, 4;
    add.s64 base, base, offset;
    red.global.add.u32 [base], 1;
STAY:
    mov.u64 until, %globaltimer;
    ld.param.u64 now, [stay_ns];
    add.s64 until, until, now;
WAIT:
    mov.u64 now, %globaltimer;
    setp.lt.u64 early, now, until;
    @early bra WAIT;
    ret;
}
"""

LENGTH = 4096
"""Numbers of SMs that can be distinguished; they may be higher than the number of SMs."""
_STAY_NS = 1_000_000
_THREADS = 1024
_BLOCKS_PER_SM = 4
"""Two of so many threads fit at once: the launch fills every SM of the share twice."""


FURTHER_ON_9 = 2
"""The SMs that kernels of green contexts may use beside their own on compute capability 9.x.

cuda.h: this holds once a module with dynamic parallelism is loaded."""


@dataclass(frozen=True, slots=True)
class SmSurvey:
    """The SMs on which a kernel ran, and the number that the driver granted, per partition."""

    seen: Mapping[Share, tuple[int, ...]]
    granted: Mapping[Share, int]
    further: int = 0
    """How many SMs kernels may use beside those of their partition."""

    @property
    def common(self) -> tuple[int, ...]:
        """SMs on which partitions ran that have no slot in common."""
        pairs = [pair for pair in combinations(self.seen, 2) if not pair[0].mask & pair[1].mask]
        return tuple(sorted({sm for one, other in pairs for sm in set(self.seen[one]) & set(self.seen[other])}))

    @property
    def extra(self) -> int:
        """The most SMs that a partition used beside those that it was granted; up to `further` are no problem."""
        return max((len(sms) - self.granted[partition] for partition, sms in self.seen.items()), default=0)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why these are no disjoint shares of the granted sizes; empty when they are, but for `further` SMs."""
        common = set(self.common)
        found = []
        for partition, sms in self.seen.items():
            granted = self.granted[partition]
            if not granted <= len(sms) <= granted + self.further:
                found.append(f"{_name(partition)} ran on {len(sms)} SMs, expected {granted}")
            elif common & set(sms) and (len(common) > self.further or len(set(sms) - common) < granted):
                shared = sorted(common & set(sms))
                found.append(f"{_name(partition)} ran on the SMs {shared} as others did, expected disjoint ones")
        return tuple(found)


class Probe:
    """The kernel, loaded. Launches are asynchronous, and can be captured."""

    def __init__(self, driver: Any, library: Any) -> None:
        self._driver = driver
        # a kernel of a library runs in the context of its stream; a function of a module would be bound to one
        self._kernel = driver.CUfunction(int(call(driver, "cuLibraryGetKernel", library, KERNEL.encode())))

    def launch(self, handle: int, address: int, sms: int) -> None:
        """Count blocks per SM into LENGTH 32-bit numbers at `address`, on the stream `handle` that has so many SMs.

        Takes about 2 ms: two turns of blocks that stay for one. Raises GpuError.
        """
        values = (address, LENGTH, _STAY_NS)
        types = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        arguments = (_BLOCKS_PER_SM * sms, 1, 1, _THREADS, 1, 1, 0, self._driver.CUstream(handle), (values, types), 0)
        call(self._driver, "cuLaunchKernel", self._kernel, *arguments)


@contextmanager
def probing(index: int, driver: Any = None) -> Iterator[Probe]:
    """Load the kernel; the primary context of the GPU is that of the calling thread meanwhile. Raises GpuError."""
    driver = load_driver() if driver is None else driver
    device = device_of(driver, index)
    primary = call(driver, "cuDevicePrimaryCtxRetain", device)
    try:
        with current(driver, primary):
            library = call(driver, "cuLibraryLoadData", PTX.encode() + b"\0", [], [], 0, [], [], 0)
            try:
                yield Probe(driver, library)
            finally:
                call(driver, "cuLibraryUnload", library)
    finally:
        call(driver, "cuDevicePrimaryCtxRelease", device)


def survey(shares: GpuPartitioner, driver: Any = None) -> SmSurvey:
    """Run the kernel in every share of a division, one after the other. The GPU should be idle otherwise.

    Raises GpuError when the driver cannot compile or run it.
    """
    driver = load_driver() if driver is None else driver
    granted = dict(shares.granted)
    with probing(shares.index, driver) as probe:
        seen = {
            each: _sms_of(driver, probe, int(shares.stream(each).cuda_stream), count) for each, count in granted.items()
        }
    return SmSurvey(seen, granted, further_of(shares.index, driver))


def further_of(index: int, driver: Any = None) -> int:
    """How many SMs beside their own the kernels of green contexts may use on this GPU. Raises GpuError."""
    driver = load_driver() if driver is None else driver
    return FURTHER_ON_9 if capability_of(driver, device_of(driver, index))[0] == 9 else 0


def _sms_of(driver: Any, probe: Probe, handle: int, granted: int) -> tuple[int, ...]:
    stream = driver.CUstream(handle)
    counts = (ctypes.c_uint32 * LENGTH)()
    address = call(driver, "cuMemAlloc", ctypes.sizeof(counts))
    try:
        call(driver, "cuMemsetD32Async", address, 0, LENGTH, stream)
        probe.launch(handle, int(address), granted)
        call(driver, "cuMemcpyDtoHAsync", ctypes.addressof(counts), address, ctypes.sizeof(counts), stream)
        call(driver, "cuStreamSynchronize", stream)
    finally:
        call(driver, "cuMemFree", address)
    return tuple(number for number, count in enumerate(counts) if count)


def _name(partition: Share) -> str:
    return f"the share of {partition.size} SMs from slot {min(partition.cores)} of {partition.device}"
