"""Profile of tasks: the time of each unit of a model on each device of a share, and the tensors between units."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from cotenant.files import load, save
from cotenant.profiles.device import Device
from cotenant.profiles.profile_file import ModelContent, ProfileError
from cotenant.techniques.placement.unit_placement import where_of

FORMAT = "cotenant-tasks/1"
MOST_DISTURBANCE = 1.1
"""Largest ratio of wall time to CPU time on one core of an undisturbed measurement."""
_Ns = Annotated[int, Meta(ge=0)]


class UnitTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor between units, by number: its producer and all its readers."""

    name: str
    producer: Annotated[int, Meta(ge=0)]
    readers: Annotated[tuple[int, ...], Meta(min_length=1)]
    size_bytes: Annotated[int, Meta(ge=0)]


class DeviceTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Times on one device: each unit's computation, the overhead of one session call, and the whole model as served."""

    unit_ns: tuple[_Ns, ...]
    launch_ns: _Ns
    whole_ns: Annotated[int, Meta(ge=1)]

    @property
    def added_up(self) -> float:
        """Sum of all units and one call over the measured whole; 1 if the times explain the whole."""
        return (sum(self.unit_ns) + self.launch_ns) / self.whole_ns


class CopyTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Copies in one direction between a GPU and the host: `bytes / bytes_per_s + latency_ns`. The latency includes the
    detection of the copy's end."""

    bytes_per_s: Annotated[float, Meta(gt=0)]
    latency_ns: _Ns


class BatchTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Times of a batch of several rows, on one core and on all cores of the share."""

    core: DeviceTimes
    whole: DeviceTimes


class ModelTasks(Struct, frozen=True, forbid_unknown_fields=True):
    """Measured tasks of one model version in a share of `cores` cores, for one row of the largest declared shape.

    - `units`: names of the units; `graph`: name of their optimised graph; `digest`, `content`: as in ModelProfile.
    - `core`: times on one core; `whole`: on all cores of the share. `hand_over_ns`: time to wake another core's lane.
    - `batches`: times of larger batches, by rows. `splits`: as of Tenant, empty if unknown. `join_ns_per_mib`: time to
      concatenate the rows of several chunks, 0 for models without batches.
    - `variation`: coefficient of variation of a segment's times (robust). `disturbance`: wall time over CPU time on one
      core, well above 1 if other processes used the core.
    - With `sms`, the share has so many SMs of a GPU, with `cores` beside it. `whole`: times on the GPU; `down`, `up`:
      copies to the host, and to the GPU.
    """

    digest: str
    graph: str
    cores: Annotated[int, Meta(ge=1)]
    units: tuple[str, ...]
    tensors: tuple[UnitTensor, ...]
    core: DeviceTimes
    whole: DeviceTimes
    hand_over_ns: _Ns
    variation: float
    disturbance: float
    sms: Annotated[int, Meta(ge=0)] = 0
    down: CopyTimes | None = None
    up: CopyTimes | None = None
    batches: dict[int, BatchTimes] = {}
    splits: tuple[tuple[int, ...], ...] = ()
    join_ns_per_mib: _Ns = 0
    content: ModelContent | UnsetType = UNSET

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes used the cores during the measurement; such times are measured again next time."""
        return self.disturbance > MOST_DISTURBANCE

    @property
    def sequential_ns(self) -> int:
        """Least measured time of the whole: on one core, or on all cores (or the GPU)."""
        return min(self.core.whole_ns, self.whole.whole_ns)

    @property
    def where(self) -> str:
        """The share in words."""
        return where_of(self.cores, self.sms)


class TaskProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """Measured tasks of a repository's models on one device, by tenant and number of cores, or of SMs."""

    device: Device
    created: str
    command: str
    models: dict[str, dict[int, ModelTasks]]
    format: str = FORMAT


def save_tasks(path: Path, profile: TaskProfile) -> None:
    """Write a profile of tasks atomically."""
    save(path, profile)


def load_tasks(path: Path) -> TaskProfile:
    """Read a profile of tasks. Raises ProfileError for other files."""
    return load(path, TaskProfile, FORMAT, ProfileError, "make it with 'cotenant place'")
