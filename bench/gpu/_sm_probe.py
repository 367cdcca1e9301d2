"""On which SMs the kernels of each share really run: a kernel that reads the number of its SM, run in every share.

The kernel is PTX, which every driver compiles for its GPU: no compiler has to be there. Each of its blocks takes half
an SM and stays for a while, so that the blocks of one launch spread over all SMs that they may use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from cotenant.execute.gpu.cuda_driver import call, current, device_of, load_driver
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

_LENGTH = 4096
"""Numbers of SMs that are told apart; they may be higher than the number of SMs."""
_STAY_NS = 1_000_000
_THREADS = 1024
_BLOCKS_PER_SM = 4
"""Two of so many threads fit at once: the launch fills every SM of the share twice."""


@dataclass(frozen=True, slots=True)
class SmSurvey:
    """The SMs on which a kernel ran, and the number that the driver granted, per partition."""

    seen: Mapping[Share, tuple[int, ...]]
    granted: Mapping[Share, int]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it should be: shares not as large as granted, or not disjoint though their slots are."""
        found = [
            f"{_name(partition)} ran on {len(sms)} SMs, and was granted {self.granted[partition]}"
            for partition, sms in self.seen.items()
            if len(sms) != self.granted[partition]
        ]
        for one, other in combinations(self.seen, 2):
            common = sorted(set(self.seen[one]) & set(self.seen[other]))
            if common and not one.mask & other.mask:
                found.append(f"{_name(one)} and {_name(other)} both ran on the SMs {common}, expected disjoint ones")
        return tuple(found)


def survey(shares: GpuPartitioner, driver: Any = None) -> SmSurvey:
    """Run the kernel in every share of a division, one after the other. The GPU should be idle otherwise.

    Raises GpuError when the driver cannot compile or run it.
    """
    driver = load_driver() if driver is None else driver
    device = device_of(driver, shares.index)
    primary = call(driver, "cuDevicePrimaryCtxRetain", device)
    granted = dict(shares.granted)
    try:
        with current(driver, primary):
            library = call(driver, "cuLibraryLoadData", PTX.encode() + b"\0", [], [], 0, [], [], 0)
            try:
                # a kernel of a library runs in the context of its stream; a function of a module would be bound to one
                kernel = driver.CUfunction(int(call(driver, "cuLibraryGetKernel", library, KERNEL.encode())))
                seen = {each: _sms_of(driver, kernel, shares.handle(each), count) for each, count in granted.items()}
            finally:
                call(driver, "cuLibraryUnload", library)
    finally:
        call(driver, "cuDevicePrimaryCtxRelease", device)
    return SmSurvey(seen, granted)


def _sms_of(driver: Any, kernel: Any, handle: int, granted: int) -> tuple[int, ...]:
    stream = driver.CUstream(handle)
    counts = (ctypes.c_uint32 * _LENGTH)()
    address = call(driver, "cuMemAlloc", ctypes.sizeof(counts))
    try:
        call(driver, "cuMemsetD32Async", address, 0, _LENGTH, stream)
        values = (int(address), _LENGTH, _STAY_NS)
        types = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        blocks = _BLOCKS_PER_SM * granted
        call(driver, "cuLaunchKernel", kernel, blocks, 1, 1, _THREADS, 1, 1, 0, stream, (values, types), 0)
        call(driver, "cuMemcpyDtoHAsync", ctypes.addressof(counts), address, ctypes.sizeof(counts), stream)
        call(driver, "cuStreamSynchronize", stream)
    finally:
        call(driver, "cuMemFree", address)
    return tuple(number for number, count in enumerate(counts) if count)


def _name(partition: Share) -> str:
    return f"the share of {partition.size} SMs from slot {min(partition.cores)} of {partition.device}"
