"""The profile of tasks: what each unit of a model takes on each device of a share, and what it hands to others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from cotenant.files import load, save
from cotenant.profile.device import Device
from cotenant.profile.profile_file import ModelContent, ProfileError
from cotenant.techniques.placement.unit_placement import where_of

FORMAT = "cotenant-tasks/1"
MOST_DISTURBANCE = 1.1
"""Wall time over CPU time on one core, up to which a measurement counts as undisturbed."""
_Ns = Annotated[int, Meta(ge=0)]


class UnitTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that one unit makes and others read, by their numbers; one tensor, however many read it."""

    name: str
    producer: Annotated[int, Meta(ge=0)]
    readers: Annotated[tuple[int, ...], Meta(min_length=1)]
    size_bytes: Annotated[int, Meta(ge=0)]


class DeviceTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured on one device: the units alone, a call of a session on top, and the whole as it is served."""

    unit_ns: tuple[_Ns, ...]
    launch_ns: _Ns
    whole_ns: Annotated[int, Meta(ge=1)]

    @property
    def added_up(self) -> float:
        """All units one after the other, and one call, over the measured whole: 1 where the times explain it."""
        return (sum(self.unit_ns) + self.launch_ns) / self.whole_ns


class CopyTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """What copies in one direction between a GPU and the host take: bytes over the rate, and the latency on top, with
    which who waits for the copy knows of its end."""

    bytes_per_s: Annotated[float, Meta(gt=0)]
    latency_ns: _Ns


class BatchTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """The same as of one row for a batch of several, on one core and on all cores of the share."""

    core: DeviceTimes
    whole: DeviceTimes


class ModelTasks(Struct, frozen=True, forbid_unknown_fields=True):
    """One model version in a share of `cores` cores, at its largest declared shape, one row; `batches` has the times of
    those larger batches that were measured, by their rows. `splits` as of Tenant; it is empty where that is not known.
    `join_ns_per_mib` is what it takes to put rows of several parts together, 0 where batches are not.

    `units` are the names of its units, `graph` that of their optimised graph, `digest` and `content` as in
    ModelProfile. `core` are times on one core, `whole` on all cores of the share; a hand-over wakes the lane of another
    core. `variation` is that of a stretch's times from run to run (robust standard deviation over median),
    `disturbance` wall time over CPU time on one core: well above 1 where others took the core meanwhile.

    With `sms` the share is of so many SMs of a GPU, the cores are beside it, and `whole` are times in the share of the
    GPU; `down` are copies from there to the host, `up` those to there.
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
        """Whether other work took the cores meanwhile: such figures are measured again when they are next asked for."""
        return self.disturbance > MOST_DISTURBANCE

    @property
    def sequential_ns(self) -> int:
        """The measured whole, on one core or on all (or on the GPU), whichever is quicker."""
        return min(self.core.whole_ns, self.whole.whole_ns)

    @property
    def where(self) -> str:
        """The share in words."""
        return where_of(self.cores, self.sms)


class TaskProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """All that was measured of a repository's models on one device, by tenant and number of cores, or of SMs."""

    device: Device
    created: str
    command: str
    models: dict[str, dict[int, ModelTasks]]
    format: str = FORMAT


def save_tasks(path: Path, profile: TaskProfile) -> None:
    """Write a profile of tasks, as a whole."""
    save(path, profile)


def load_tasks(path: Path) -> TaskProfile:
    """Read a profile of tasks. Raises ProfileError when it is none."""
    return load(path, TaskProfile, FORMAT, ProfileError, "make it with 'cotenant place'")
