"""Placements of a model's units over the devices of a share, as plan files hold them and servers find them.

The cores of a share are numbered from 0; `cpu:0`, `cpu:1`, ... are lanes of one core, `cpu:0-1` is all of them at once.
A share of a GPU is `cuda:0`, whichever GPU it is of, and the cores are some beside it, each a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from cotenant.files import load, save
from cotenant.profile.profile_file import ProfileError

FORMAT = "cotenant-placement/1"
_Name = Annotated[str, Meta(min_length=1)]
_Ns = Annotated[int, Meta(ge=0)]
GPU_LANE = "cuda:0"
"""The device that is a share of a GPU."""


class PlacedRun(Struct, frozen=True, forbid_unknown_fields=True):
    """Units that stand in a row in the order of a placement, and the device that runs them."""

    device: _Name
    units: Annotated[tuple[_Name, ...], Meta(min_length=1)]


class UnitPlacement(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the units of a model run in a share of `cores` cores, in order: every device runs its own as they stand.
    With `sms` the share is of so many SMs of a GPU, and the cores are beside it.

    `graph` names the optimised graph whose units they are (the folder of `Runner.graph_path`). `latency_ns` is what the
    plan was made to come to, `sequential_ns` the same for one unit after the other, `bound_ns` what no plan goes below.
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
        """Each unit and its device, in order."""
        return tuple((unit, run.device) for run in self.runs for unit in run.units)

    def places(self, names: Sequence[str], devices: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The order as numbers of units, and the device of each unit, for a graph of such units and devices.

        Raises ProfileError where the placement is of another graph: another unit or device.
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
    """Units with their devices, those in a row on one device taken together."""
    return tuple(
        PlacedRun(device, tuple(unit for unit, _ in same)) for device, same in groupby(units, key=lambda each: each[1])
    )


def lane_name(core: int) -> str:
    """The device that is one core of the share."""
    return f"cpu:{core}"


def whole_name(cores: int) -> str:
    """The device that is all cores of the share at once."""
    return f"cpu:0-{cores - 1}"


def device_names(cores: int, sms: int = 0) -> tuple[str, ...]:
    """The devices of a share: its cores, and all of them at once; of a share of a GPU that and the cores beside it."""
    lanes = tuple(map(lane_name, range(cores)))
    return (GPU_LANE, *lanes) if sms else (*lanes, whole_name(cores))


def where_of(cores: int, sms: int = 0) -> str:
    """A share in words."""
    on_cores = f"{cores} core{'' if cores == 1 else 's'}"
    return f"{sms} SMs and {on_cores}" if sms else on_cores


def cores_of(device: str, sms: int = 0) -> range:
    """The cores of a device, by their numbers within the share; beside a GPU, which is number 0, they count from 1.

    Raises ValueError for what is none.
    """
    if sms and device == GPU_LANE:
        return range(1)
    first, dash, last = device.removeprefix("cpu:").partition("-")
    return range(int(first) + bool(sms), int(last if dash else first) + 1 + bool(sms))


def save_placement(path: Path, placement: UnitPlacement) -> None:
    """Write a placement where a server finds it."""
    save(path, placement)


def load_placement(path: Path) -> UnitPlacement:
    """Read a placement. Raises ProfileError when it is none."""
    return load(path, UnitPlacement, FORMAT, ProfileError, "run 'cotenant place' again")
