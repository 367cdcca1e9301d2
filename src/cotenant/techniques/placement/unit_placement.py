"""Placements of a model's units over the devices of a share, the format of plan files and repositories.

Cores of a share are numbered from 0. Devices: `cpu:0`, `cpu:1`, ... are single cores, `cpu:0-1` is all cores at once.
With a GPU, `cuda:0` is the share of whichever GPU, and the cores are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from cotenant.files import load, save
from cotenant.profiles.profile_file import ProfileError

FORMAT = "cotenant-placement/1"
_Name = Annotated[str, Meta(min_length=1)]
_Ns = Annotated[int, Meta(ge=0)]
GPU_LANE = "cuda:0"
"""Name of the device of a GPU share."""


class PlacedRun(Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive units of a placement's order on one device."""

    device: _Name
    units: Annotated[tuple[_Name, ...], Meta(min_length=1)]


class UnitPlacement(Struct, frozen=True, forbid_unknown_fields=True):
    """Placement of a model's units in a share of `cores` cores. Every device runs its units in the given order.

    `sms`: number of SMs of a GPU share, with the cores beside it; 0 without a GPU. `graph`: name of the optimised graph
    of the units (the folder of `Runner.graph_path`). `latency_ns`: predicted latency; `sequential_ns`: latency of the
    sequential run; `bound_ns`: lower bound of all placements.
    """

    model: _Name
    graph: _Name
    cores: Annotated[int, Meta(ge=1)]
    latency_ns: _Ns
    sequential_ns: _Ns
    bound_ns: _Ns
    runs: Annotated[tuple[PlacedRun, ...], Meta(min_length=1)] = field(name="run")
    format: str = FORMAT
    sms: Annotated[int, Meta(ge=0)] = 0

    @property
    def size(self) -> int:
        """Size of the share: SMs of the GPU, or cores."""
        return self.sms or self.cores

    @property
    def where(self) -> str:
        """The share in words."""
        return where_of(self.cores, self.sms)

    @property
    def units(self) -> tuple[tuple[str, str], ...]:
        """Units with their devices, in order."""
        return tuple((unit, run.device) for run in self.runs for unit in run.units)

    def places(self, names: Sequence[str], devices: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The order as unit numbers, and the device of each unit, for a graph with these units and devices.

        Raises ProfileError for a placement of another graph.
        """
        numbers = {name: number for number, name in enumerate(names)}
        order, place = [], [""] * len(names)
        for unit, device in self.units:
            if unit not in numbers or device not in devices:
                raise ProfileError(
                    f"placement of {self.model!r}: unit {unit!r} on {device!r}, expected units of the model and one of "
                    f"{', '.join(devices)}"
                )
            order.append(numbers[unit])
            place[numbers[unit]] = device
        if sorted(order) != list(range(len(names))):
            raise ProfileError(f"placement of {self.model!r}: expected each of its {len(names)} units once")
        return tuple(order), tuple(place)


def runs_of(units: Sequence[tuple[str, str]]) -> tuple[PlacedRun, ...]:
    """Combine consecutive units on one device."""
    return tuple(
        PlacedRun(device, tuple(unit for unit, _ in same)) for device, same in groupby(units, key=lambda each: each[1])
    )


def lane_name(core: int) -> str:
    """Name of the device of one core."""
    return f"cpu:{core}"


def whole_name(cores: int) -> str:
    """Name of the device of all cores at once."""
    return f"cpu:0-{cores - 1}"


def device_names(cores: int, sms: int = 0) -> tuple[str, ...]:
    """Devices of a share: its cores and all cores at once, or a GPU share and the cores beside it."""
    lanes = tuple(map(lane_name, range(cores)))
    return (GPU_LANE, *lanes) if sms else (*lanes, whole_name(cores))


def where_of(cores: int, sms: int = 0) -> str:
    """A share in words."""
    on_cores = f"{cores} core{'' if cores == 1 else 's'}"
    return f"{sms} SMs and {on_cores}" if sms else on_cores


def cores_of(device: str, sms: int = 0) -> range:
    """Core numbers of a device of a share, from 0. With a GPU, the GPU has number 0, and cores count from 1.

    Raises ValueError for an unknown device.
    """
    if sms and device == GPU_LANE:
        return range(1)
    first, dash, last = device.removeprefix("cpu:").partition("-")
    return range(int(first) + bool(sms), int(last if dash else first) + 1 + bool(sms))


def save_placement(path: Path, placement: UnitPlacement) -> None:
    """Write a placement to the repository's path for it."""
    save(path, placement)


def load_placement(path: Path) -> UnitPlacement:
    """Read a placement. Raises ProfileError for other files."""
    return load(path, UnitPlacement, FORMAT, ProfileError, "run 'cotenant place' again")
