"""Opens models of a repository and checks which profiles hold for them; for serving and profiling."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType, structs

from cotenant.config import NO_CONFIG, NS_PER_MS
from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.contents import file_digest
from cotenant.execute.open_model import engine_of, open_model
from cotenant.execute.protocol import TargetDevice
from cotenant.execute.runner import Runner
from cotenant.execute.strategy import VersionTrial, follows_of, strategies
from cotenant.graph.datatypes import numpy_type
from cotenant.measure.campaign import leaving_out
from cotenant.measure.draft import drafted
from cotenant.measure.inputs import DeclaredShape, check_shapes, make_inputs
from cotenant.measure.merging_trial import check_open, judge_merging
from cotenant.measure.samples import NO_SAMPLES, Samples
from cotenant.measure.solo import CORES, Effort, Sweep
from cotenant.profiles.device import Device, this_device
from cotenant.profiles.merging import SINGLE, Merging
from cotenant.profiles.profile_file import ModelProfile, Profile, load_profile
from cotenant.repository import (
    CONFIG_FILE,
    ModelVersion,
    check_owners,
    find_versions,
    graphs_path,
    model_names,
    profile_path,
)
from cotenant.repository.formats import Arithmetic
from cotenant.repository.sources import check_not_empty
from cotenant.wire.model_limits import carried
from cotenant.work import CPU, Share

LONGEST_SEGMENT_MS = 10.0
"""Default of `segments.max_ms`."""
_rows_log = logging.getLogger("cotenant.rows")
_verdicts: dict[str, Merging] = {}
_MOST_VERDICTS = 256
"""Verdicts kept in this process, by digest: a model that is loaded again is not tried again."""
_SEGMENTS_PER_SLO = 10
"""Segments for each SLO on a GPU, where most models end within LONGEST_SEGMENT_MS: enough cuts to pause a launch."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model version that can run, with the shapes at which it is profiled and the digest that identifies it."""

    found: ModelVersion
    runner: Runner
    shapes: tuple[DeclaredShape, ...]
    digest: str
    device: str = CPU
    gains: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By run strategy that the model follows: by size of share, latency with the strategy over that of a plain run."""
    samples: Samples = NO_SAMPLES
    merging: Merging = SINGLE
    """Whether its queries may be merged; if not, `found.config.model.max_batch` is 1, whatever the file says."""
    _known_splits: list[tuple[tuple[int, ...], ...] | UnsetType] = field(
        default_factory=list, compare=False, repr=False
    )

    @property
    def splits(self) -> tuple[tuple[int, ...], ...] | UnsetType:
        """See `Tenant`; computed at the first read, while the model is open. A valid profile has it already."""
        if not self._known_splits:
            is_merged = self.found.config.model.max_batch > 1
            self._known_splits.append(_splits(self.runner, self.shapes) if is_merged else UNSET)
        return self._known_splits[0]

    @property
    def row_bytes(self) -> tuple[tuple[int, int], ...]:
        """Bytes of the input and output tensors of one row, by declared shape.

        Dimensions of outputs that the model leaves open count as 1, and texts as one byte each.
        """
        skipped = 1 if self.found.config.model.max_batch > 1 else 0
        given = sum(_row_bytes(each.dtype, (each.shape or ())[skipped:]) for each in self.runner.outputs)
        return tuple(
            (sum(_row_bytes(each.dtype, shape[each.name][skipped:]) for each in self.runner.inputs), given)
            for shape in self.shapes
        )

    def sweep(self, lanes: Sequence[Share], effort: Effort) -> Sweep:
        """Points to measure: each partition size of the lanes, and one core of a CPU."""
        shares = {lane.size: lane for lane in reversed(lanes)}
        if lanes[0].device == CPU:
            shares.setdefault(1, Share(lanes[0].cores[:1]))
        config = self.found.config
        return Sweep(
            self.digest,
            self.shapes,
            config.model.max_batch,
            tuple(shares[size] for size in sorted(shares)),
            round(self._longest_segment_ms * NS_PER_MS),
            effort,
            self.splits,
            self.samples,
            self.merging,
        )

    @property
    def _longest_segment_ms(self) -> float:
        config = self.found.config
        if config.segments.max_ms is not None:
            return config.segments.max_ms
        on_gpu = config.tenant.slo_ms / _SEGMENTS_PER_SLO
        return LONGEST_SEGMENT_MS if self.device == CPU else min(LONGEST_SEGMENT_MS, on_gpu)


def covers(profile: ModelProfile, partitions: Sequence[Share]) -> bool:
    """Whether a profile has every size of partition."""
    return {each.size for each in partitions} <= {point.cores for point in profile.points}


def has_batches(profile: ModelProfile, opened: OpenedModel) -> bool:
    """Whether a profile has the largest batch of a model; one made while merging was refused lacks it."""
    largest = opened.found.config.model.max_batch
    return max((point.items for point in profile.points), default=largest) >= largest


def open_version(
    root: Path, found: ModelVersion, target: TargetDevice = CORES, shares: Sequence[Share] = (), *, placed: bool = True
) -> OpenedModel:
    """Load the graph onto a device and check the configuration against it.

    Unless `placed` is False the model follows run strategies that gain; `shares` are those of a GPU that it may use.
    Raises ModelError or ConfigError.
    """
    opened = open_untried(root, found, target)
    try:
        if placed:
            opened = follow_gains(root, opened, target, shares)
        return judge_rows(root, opened)
    except CotenantError:
        opened.runner.close()
        raise


def open_untried(
    root: Path,
    found: ModelVersion,
    target: TargetDevice = CORES,
    *,
    is_draft: bool = False,
    faults: Sequence[str] = (),
) -> OpenedModel:
    """Load the graph onto a device and check the configuration and the protocol's tensors against it.

    Runs nothing, unless `is_draft` asks for a first configuration (`drafted`). `faults` are problems of its
    configuration that are known. Raises ModelError or ConfigError with all problems.
    """
    name, arithmetic = found.tenant, arithmetic_of(found)
    try:
        runner = open_model(
            found.path, cache_dir=graphs_path(root), name=name, device=target.device, arithmetic=arithmetic
        )
    except CotenantError as error:
        if faults:
            raise ConfigError(*faults, *error.problems) from None
        raise
    problems, shapes, samples = list(faults), tuple[DeclaredShape, ...](), NO_SAMPLES
    try:
        if is_draft:
            found = drafted(found, runner)
        model = found.config.model
        if not any(": model.shapes" in each for each in faults) and found.config != NO_CONFIG:
            with adding(problems):
                shapes = check_shapes(found.model, runner.inputs, model.shapes)
        with adding(problems):
            given = found.config.samples, found.path.parent.parent, _words(runner)
            samples = Samples.read(found.model, runner.inputs, *given)
        if model.max_batch > 1:
            with adding(problems):
                check_open(found.model, runner, model.max_batch)
        with adding(problems):
            carried(found.model, runner.inputs, runner.outputs, shapes)
        if problems:
            raise ConfigError(*problems)
    except CotenantError:
        runner.close()
        raise
    return OpenedModel(found, runner, shapes, _digest(found, runner, shapes, samples), target.device, samples=samples)


def _words(runner: Runner) -> tuple[str, ...]:
    """Words that a model with texts as inputs knows; none of other formats than ONNX."""
    if runner.files[0].suffix != ".onnx" or all(tensor.dtype != "tensor(string)" for tensor in runner.inputs):
        return ()
    from cotenant.graph.onnx import vocabulary

    return vocabulary(runner.files[0])


@contextmanager
def adding(problems: list[str]) -> Iterator[None]:
    """Add the problems of a ConfigError inside to a list, in its place."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def judge_rows(root: Path, opened: OpenedModel) -> OpenedModel:
    """Judge whether queries may be merged; if not, `max_batch` becomes 1.

    Raises ConfigError when a first dimension is fixed.
    """
    merging = _judged(root, opened)
    return replace(opened, found=merged_as(opened.found, merging), merging=merging)


def as_drafted(opened: OpenedModel) -> OpenedModel:
    """The model with the digest that it has under the configuration that was found, which a server will read."""
    return replace(opened, digest=_digest(opened.found, opened.runner, opened.shapes, opened.samples, opened.gains))


def merged_as(found: ModelVersion, merging: Merging) -> ModelVersion:
    """The version, with `max_batch` 1 if merging is not allowed."""
    if merging.is_allowed:
        return found
    model = structs.replace(found.config.model, max_batch=1)
    return replace(found, config=structs.replace(found.config, model=model))


def follow_gains(
    root: Path,
    opened: OpenedModel,
    target: TargetDevice,
    shares: Sequence[Share],
    tell: Callable[[str], None] = lambda _: None,
) -> OpenedModel:
    """Let the model follow run strategies that gain, measured if that is unknown; `tell` gets each name before.

    `shares` are those of a GPU. Raises ModelError.
    """
    found, runner, config = opened.found, opened.runner, opened.found.config
    inputs = partial(_inputs, runner, config.model.max_batch > 1, opened.samples)
    trial = VersionTrial(found, graphs_path(root), opened.shapes, target, shares, inputs)
    gains = {}
    for name, strategy in strategies().items():
        if what := strategy.measures(found):
            tell(what)
            if ratios := strategy.choose(runner, trial):
                gains[name] = ratios
    if not gains:
        return opened
    return replace(opened, gains=gains, digest=_digest(found, runner, opened.shapes, opened.samples, gains))


def _inputs(runner: Runner, is_batched: bool, samples: Samples, shape: DeclaredShape, rows: int) -> dict[str, Any]:
    return make_inputs(runner.inputs, shape, rows, is_batched, samples)


def arithmetic_of(found: ModelVersion) -> Arithmetic:
    """The configured arithmetic of a version."""
    return Arithmetic(found.config.model.precision, found.config.model.channels_last)


def _digest(
    found: ModelVersion,
    runner: Runner,
    shapes: Sequence[DeclaredShape],
    samples: Samples,
    gains: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
) -> str:
    """Key of a profile: the content of the model's files, and everything else that its latency depends on."""
    model, arithmetic = found.config.model, arithmetic_of(found)
    with runner.files[0].open("rb") as file:
        content = hashlib.file_digest(file, "sha256")
    for weights in runner.files[1:]:
        content.update(file_digest(weights).encode())
    longest_ms = found.config.segments.max_ms or LONGEST_SEGMENT_MS
    content.update(msgspec.json.encode((shapes, model.max_batch, longest_ms)))
    if model.batching != "proven":
        content.update(model.batching.encode())
    if arithmetic != Arithmetic():
        content.update(msgspec.json.encode((arithmetic.precision, arithmetic.lays_out)))
    content.update(runner.kernels.encode())
    follows = follows_of(runner)
    for name in gains:
        content.update(msgspec.json.encode(follows[name]))
    package = engine_of(found.path).package
    if package != "onnxruntime":  # its version is in the device's fingerprint
        content.update(_version(package).encode())
    content.update(samples.digest.encode())
    return content.hexdigest()[:16]


def _splits(runner: Runner, shapes: Sequence[DeclaredShape]) -> tuple[tuple[int, ...], ...] | UnsetType:
    """Runs of units that may run for some of the rows, equal at every declared shape; unset if they are unknown."""
    if not hasattr(runner, "row_graph"):  # a format of another package
        return UNSET
    try:
        found = [runner.row_graph(shape).runs for shape in shapes]
    except Exception as error:  # for any file: a model that cannot run in chunks can still be served
        is_expected = isinstance(error, CotenantError)
        text = "model %r: which units treat every row by itself is not known: %s"
        level = logging.INFO if is_expected else logging.WARNING
        _rows_log.log(level, text, runner.name, error, exc_info=not is_expected)
        return UNSET
    return found[0] if all(each == found[0] for each in found) else UNSET


def names_to_profile(root: Path) -> tuple[str, ...]:
    """The names of the models of a repository. Raises ConfigError when there is none."""
    names = model_names(root)
    if not names:
        check_not_empty(root)
        raise ConfigError(
            f"{root}: holds no models to profile, expected directories with {CONFIG_FILE} and 1/model.onnx "
            "(or model.pt2)"
        )
    return names


def open_all(root: Path, errors: dict[str, str]) -> dict[str, OpenedModel]:
    """All versions of all models of a repository, by tenant.

    `errors` gets the reasons of omissions, by model. Raises ConfigError when there is no model.
    """
    opened: dict[str, OpenedModel] = {}
    for name in names_to_profile(root):
        with leaving_out(errors, name):
            unreadable: dict[str, str] = {}
            versions = find_versions(root, name, unreadable)
            check_owners(versions, {tenant: each.found.model for tenant, each in opened.items()})
            errors |= {f"{name} {version}": reason for version, reason in unreadable.items()}
            opened |= _open_each(root, versions, errors)
    return opened


def _open_each(root: Path, versions: Sequence[ModelVersion], errors: dict[str, str]) -> dict[str, OpenedModel]:
    """The versions of one model that can be opened; the newest of them is the default one."""
    opened: dict[str, OpenedModel] = {}
    for found in reversed(versions):
        at = found.model if len(versions) == 1 else f"{found.model} {found.version}"
        with leaving_out(errors, at):
            each = open_version(root, replace(found, is_default=not opened))
            opened[each.found.tenant] = each
    return dict(reversed(opened.items()))


@contextmanager
def open_profiled(root: Path, profile: Profile, errors: dict[str, str]) -> Iterator[dict[str, OpenedModel]]:
    """All models with a valid profile, by tenant, until the block ends. `errors` gets the reasons of omissions.

    Raises ConfigError when there is none.
    """
    opened = open_all(root, errors)
    try:
        valid = {}
        for name, each in opened.items():
            known = profile.models.get(name)
            if known is not None and is_of(known, profile.device, each):
                valid[name] = each
            else:
                errors[each.found.model] = f"{name}: has no valid profile on this device; run 'cotenant profile'"
        if not valid:
            raise ConfigError(f"{root}: no model has a valid profile on this device; run 'cotenant profile' first")
        yield valid
    finally:
        for each in opened.values():
            each.runner.close()


def _judged(root: Path, opened: OpenedModel) -> Merging:
    """Whether queries of the model may be merged: from a valid profile, else judged now."""
    found, digest, model = opened.found, opened.digest, opened.found.config.model
    if model.max_batch == 1:
        return SINGLE
    known = _verdicts.get(digest) or _profiled_merging(root, opened)
    if known is None:
        how = model.max_batch, model.batching
        known = judge_merging(opened.runner, opened.shapes, *how, device=opened.device, samples=opened.samples)
    remember_verdict(digest, known)
    if known.verdict == "refused":
        text = "model %r: its queries run alone (max_batch = 1, where config.toml has %d): %s"
        _rows_log.warning(text, found.model, model.max_batch, known.reason)
    elif known.verdict == "trusted":
        _rows_log.warning("model %r: queries are merged without a proof: %s", found.model, known.reason)
    return known


def verdicts() -> dict[str, Merging]:
    """The verdicts on merging that this process knows, by digest: from trials and from serving."""
    return dict(_verdicts)


def remember_verdict(digest: str, merging: Merging) -> None:
    """Keep a verdict for the life of this process; it takes precedence over that of the profile."""
    _verdicts.pop(digest, None)
    _verdicts[digest] = merging
    if len(_verdicts) > _MOST_VERDICTS:
        del _verdicts[next(iter(_verdicts))]


def _profiled_merging(root: Path, opened: OpenedModel) -> Merging | None:
    """The verdict in the repository's profile, if this version of cotenant made it on this device."""
    path = profile_path(root)
    if not path.exists():
        return None
    try:
        stored = load_profile(path)
    except CotenantError:
        return None  # the reader that needs the profile says so
    here, known = this_device(opened.device), stored.of_digest(opened.found.tenant, opened.digest)
    is_ours = stored.device.processor == here.processor and stored.device.versions == here.versions
    return known.merging if is_ours and known is not None and known.merging is not UNSET else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a module without a distribution
        return ""


def is_of(profile: ModelProfile, device: Device, opened: OpenedModel) -> bool:
    """Whether a profile that was measured on `device` holds for this model on this device.

    The number of cores may differ: a process with fewer cores still finds each of them as fast.
    """
    here = this_device(opened.device)
    package = engine_of(opened.found.path).package
    return (
        profile.digest == opened.digest
        and profile.cuts[-1] == len(profile.unit_ns) == opened.runner.unit_count
        and has_batches(profile, opened)
        and device.processor == here.processor
        and device.versions.get(package) == here.versions.get(package)
    )


def _row_bytes(dtype: str, dims: Sequence[object]) -> int:
    kind = numpy_type(dtype)
    size = 1 if kind is None or kind.kind in "OU" else kind.itemsize
    return size * prod(each for each in dims if isinstance(each, int) and each > 0)
