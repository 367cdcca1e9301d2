"""Asks the driver how the SMs of a GPU can be divided."""

from __future__ import annotations

from typing import Any

from cotenant.execute.gpu.cuda_driver import (
    GREEN_SINCE,
    GpuError,
    attribute,
    call,
    capability_of,
    device_of,
    load_driver,
    start,
)
from cotenant.execute.gpu.sm_ladder import SmGrid, granularity_of


def split_groups(driver: Any, device: Any) -> tuple[SmGrid, tuple[Any, ...]]:
    """Split a GPU's SMs into as many groups of the smallest size as possible. Raises GpuError."""
    version = int(call(driver, "cuDriverGetVersion"))
    if version < GREEN_SINCE:
        found = f"{version // 1000}.{version % 1000 // 10}"
        raise GpuError(f"the driver is of CUDA {found}, and green contexts need one of 12.4 or newer")
    resource = call(driver, "cuDeviceGetDevResource", device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    # bindings of CUDA 12 do not report the driver's smallest share
    least = int(getattr(resource.sm, "minSmPartitionSize", 0)) or granularity_of(capability_of(driver, device))
    _, count, _ = call(driver, "cuDevSmResourceSplitByCount", 0, resource, 0, least)
    if not int(count):
        raise GpuError(f"the driver makes no group of {least} SMs of the {resource.sm.smCount} of this GPU")
    groups, count, _ = call(driver, "cuDevSmResourceSplitByCount", int(count), resource, 0, least)
    groups = tuple(groups[: int(count)])
    sizes = sorted({int(group.sm.smCount) for group in groups})
    if len(sizes) != 1:
        raise GpuError(f"the driver made groups of {sizes} SMs, expected groups of one size")
    return SmGrid(int(resource.sm.smCount), sizes[0], len(groups)), groups


def ask_grid(index: int, sharing: str, driver: Any = None) -> SmGrid:
    """How the SMs of a GPU can be divided by this way of sharing. Raises GpuError."""
    if driver is None:
        driver = load_driver()
    else:
        start(driver)
    device = device_of(driver, index)
    if sharing == "green":
        return split_groups(driver, device)[0]
    return SmGrid(attribute(driver, device, "MULTIPROCESSOR_COUNT"))
