"""Messages between a server and the process that loads a version of a model: plain data in both directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from cotenant.config import DeviceSection
from cotenant.execute.protocol import Followed, ModelSource
from cotenant.execute.strategy import follows_of
from cotenant.graph.dfg import Tensor
from cotenant.measure.inputs import DeclaredShape
from cotenant.measure.merging_trial import has_one_row
from cotenant.measure.opened_model import OpenedModel, arithmetic_of
from cotenant.measure.solo import Effort
from cotenant.profiles.merging import SINGLE, Merging
from cotenant.profiles.profile_file import ModelProfile
from cotenant.repository import ModelVersion
from cotenant.work import CPU, Share

MEASURING = "measuring "
"""Prefix of the names of steps that measure."""
MEASURED = f"{MEASURING}it, after "
"""Prefix of the names of steps of a campaign; the rest is the measurement that has ended."""


class VersionSpec(Struct, frozen=True):
    """A version of a model of the repository at `root`, to be opened, tried and measured in these shares.

    `device` is the section of its device, None for cores of this machine. `known` are quick profiles of earlier loads,
    `verdicts` their verdicts on merging, by digest. Without `shares` nothing is measured. `is_draft`: shapes and
    the largest batch that the configuration leaves out are found by trial (`measure.draft`). `faults` are problems of
    its configuration: the version is opened to find further ones, and refused with all of them.

    With `effort` the version is measured for a profile: points that `known` lacks, with a journal at `journal`, without
    a limit of time. It is refused where it cannot run on sample values.
    """

    root: str
    found: ModelVersion
    shares: tuple[Share, ...] = ()
    known: tuple[ModelProfile, ...] = ()
    device: DeviceSection | None = None
    verdicts: dict[str, Merging] = {}
    is_draft: bool = False
    faults: tuple[str, ...] = ()
    effort: Effort | None = None
    journal: Path | None = None


class VersionFacts(Struct, frozen=True):
    """Properties of an opened version of a model. `folder` has its graph and the copies of its files.

    `gains` and `follows` are by run strategy: see `OpenedModel` and `ModelSource`. `splits`: see `Tenant`. `merging` is
    as in a profile; if merging is not allowed, `found` has `max_batch` 1.
    """

    found: ModelVersion
    folder: Path
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    unit_count: int
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    digest: str
    device: str = CPU
    gains: dict[str, dict[int, float]] = {}
    follows: dict[str, Followed] = {}
    splits: tuple[tuple[int, ...], ...] | UnsetType = UNSET
    merging: Merging = SINGLE

    @property
    def source(self) -> ModelSource:
        """The source that an executor loads."""
        found = self.found
        return ModelSource(found.path, self.folder, found.tenant, self.device, arithmetic_of(found), self.follows)


class LoadReport(Struct, frozen=True):
    """The result of loading a version. `warning` says why its latencies are assumed, or is ""."""

    facts: VersionFacts
    profile: ModelProfile
    warning: str = ""
    is_measured: bool = False
    """Whether the profile was measured by this load."""


def facts_of(opened: OpenedModel, splits: tuple[tuple[int, ...], ...] | UnsetType = UNSET) -> VersionFacts:
    """The plain data of an opened model."""
    runner = opened.runner
    return VersionFacts(
        opened.found,
        runner.graph_path.parent,
        runner.inputs,
        tuple(_batched(each) if opened.merging.is_allowed else each for each in runner.outputs),
        runner.unit_count,
        tuple(_plain(shape) for shape in opened.shapes),
        opened.digest,
        opened.device,
        {name: dict(ratios) for name, ratios in opened.gains.items()},
        {name: chosen for name, chosen in follows_of(runner).items() if name in opened.gains},
        splits,
        opened.merging,
    )


def _batched(output: Tensor) -> Tensor:
    """An output of merged queries: it has as many rows as the batch, even if the file declares one."""
    return replace(output, shape=(None, *output.shape[1:])) if output.shape and has_one_row(output) else output


def _plain(shape: DeclaredShape) -> dict[str, tuple[int, ...]]:
    return {name: tuple(dims) for name, dims in shape.items()}


def encode(value: object) -> bytes:
    """Encode a message to or from the child."""
    return msgspec.msgpack.encode(value, enc_hook=_path_to_text)


def decode(data: bytes, kind: Any) -> Any:
    """Inverse of `encode`, for a type or a union of types. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_path_of_text)


def _path_to_text(value: object) -> object:
    assert isinstance(value, Path)
    return str(value)


def _path_of_text(kind: type, value: object) -> object:
    assert kind is Path
    return Path(str(value))
