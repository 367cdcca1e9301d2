"""The cores, or the SMs of a GPU, that a configuration asks for, as lanes."""

from __future__ import annotations

import os

from cotenant.config import DeviceSection
from cotenant.errors import ConfigError, CotenantError, InvalidValueError
from cotenant.execute.gpu.sm_ladder import SmGrid, shares_of, whole
from cotenant.work import Share


def device_cores(section: DeviceSection, where: str = "[device]") -> tuple[int, ...]:
    """The cores to use. Raises ConfigError when one is not available to this process."""
    available = tuple(sorted(os.sched_getaffinity(0)))
    missing = [core for core in section.cores if core not in available]
    if missing:
        raise ConfigError(f"{where}: cores names {missing}, but this process may use only {list(available)}")
    if len(set(section.cores)) != len(section.cores):
        raise ConfigError(f"{where}: cores is {list(section.cores)}, expected each core once")
    return section.cores or available


def lanes_of(
    section: DeviceSection, cores: tuple[int, ...], where: str = "[device]", grid: SmGrid | None = None
) -> tuple[Share, ...]:
    """The partitions that the cores, or the SMs of the GPU, are divided into. Raises ConfigError.

    `grid` says how the SMs of the GPU can be divided; left out, its driver is asked.
    """
    if section.kind == "cuda":
        return _gpu_lanes(section, where, grid)
    if section.shares:
        raise ConfigError(f"{where}: shares divides a GPU; set kind = 'cuda', or name cores in lanes")
    if section.lanes == "single":
        return tuple(Share((core,)) for core in cores)
    if section.lanes == "all":
        return (Share(cores),)
    if isinstance(section.lanes, str):
        raise ConfigError(f"{where}: lanes is {section.lanes!r}, expected 'single', 'all' or lists of core numbers")
    try:
        lanes = tuple(Share(tuple(lane)) for lane in section.lanes)
    except InvalidValueError as error:
        raise ConfigError(f"{where}: lanes: {error}") from None
    used = [core for lane in lanes for core in lane.cores]
    if not lanes or len(set(used)) != len(used) or not set(used) <= set(cores):
        raise ConfigError(f"{where}: lanes is {section.lanes!r}, expected disjoint lists of the cores {list(cores)}")
    return lanes


def _gpu_lanes(section: DeviceSection, where: str, grid: SmGrid | None) -> tuple[Share, ...]:
    if section.lanes not in ("single", "all"):
        raise ConfigError(f"{where}: lanes is {section.lanes!r}: lists of cores divide a CPU, shares = [50, 50] a GPU")
    if section.lanes == "all" and section.shares:
        raise ConfigError(f"{where}: lanes is 'all' and shares is {list(section.shares)}, expected one of them")
    if section.sharing == "mps" and section.isolation != "process":
        raise ConfigError(f"{where}: sharing is 'mps', which divides a GPU among processes; set isolation = 'process'")
    if section.sharing == "mps" and len(set(section.shares)) > 1:
        text = "sharing is 'mps', where a worker has the same share in every lane"
        raise ConfigError(f"{where}: shares is {list(section.shares)}, expected equal ones: {text}")
    if grid is None:
        grid = _ask_driver(section, where)
    try:
        if section.shares:
            return shares_of(section.shares, grid, section.index, where)
    except InvalidValueError as error:
        raise ConfigError(str(error)) from None
    return (whole(grid, section.index),)


def _ask_driver(section: DeviceSection, where: str) -> SmGrid:
    from cotenant.execute.gpu.sm_groups import ask_grid

    try:
        return ask_grid(section.index, section.sharing)
    except CotenantError as error:
        raise ConfigError(f"{where}: kind is 'cuda', but {error}") from None
