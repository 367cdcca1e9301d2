"""Lanes of a configuration: sets of cores, or of SMs of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.config import DeviceSection
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.execute.registry import layout_of
from cotenant.linux import ROOT, available_cores, cpu_quota
from cotenant.work import CPU, Machine, Share


def usable_cores(root: Path = ROOT) -> tuple[int, ...]:
    """The cores for lanes where none are named: those that the process may use, as many as its CPU quota pays for.

    The kernel stops all threads of a container with a used-up quota, for the rest of a period of 100 ms. Kubernetes'
    `limits.cpu` without whole cores is such a quota. More lanes than the quota's cores would use it up together.
    """
    available = available_cores()
    quota = cpu_quota(root)
    return available if quota is None else available[: max(1, int(quota))]


def device_cores(section: DeviceSection, where: str = "[device]") -> tuple[int, ...]:
    """Cores that the server may use. Raises ConfigError when this process may not use one of them."""
    available = available_cores()
    missing = [core for core in section.cores if core not in available]
    if missing:
        raise ConfigError(f"{where}: cores names {missing}, but this process may use only {list(available)}")
    if len(set(section.cores)) != len(section.cores):
        raise ConfigError(f"{where}: cores is {list(section.cores)}, expected each core once")
    return section.cores or usable_cores()


def cores_alone(section: DeviceSection, what: str, where: str = "[device]") -> tuple[int, ...]:
    """The cores, for a command that needs the CPU. Raises ConfigError for another device, and as `device_cores`."""
    if section.kind != CPU:
        raise ConfigError(f"{where}: kind is {section.kind!r}, and {what} on the CPU alone: set kind = 'cpu'")
    return device_cores(section)


def lanes_of(section: DeviceSection, cores: tuple[int, ...], where: str = "[device]") -> tuple[Share, ...]:
    """The partitions that the cores, or the SMs of the GPU, are divided into. Raises ConfigError."""
    return layout_of(section, where).lanes(section, cores, where)


class CoreLayout:
    """A CPU divided into sets of cores. Implements `Layout`."""

    def lanes(self, section: DeviceSection, cores: tuple[int, ...], where: str) -> tuple[Share, ...]:
        """One lane for each core, one for all, or the configured sets of cores."""
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
            raise ConfigError(
                f"{where}: lanes is {section.lanes!r}, expected disjoint lists of the cores {list(cores)}"
            )
        return lanes

    def machine(self, lanes: Sequence[Share], cores: tuple[int, ...]) -> Machine:
        """A machine of all cores, since the lanes may change while it serves."""
        return Machine.cpu(cores)


CORES = CoreLayout()
