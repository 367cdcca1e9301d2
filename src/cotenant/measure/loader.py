"""Loads a version of a model for service: opens, tries and measures it. It runs in a child: see `loader_process`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import UNSET, structs

from cotenant import linux
from cotenant.config import NS_PER_MS
from cotenant.errors import CotenantError
from cotenant.execute.batches import row_buckets
from cotenant.execute.errors import ModelError
from cotenant.execute.protocol import TargetDevice
from cotenant.execute.registry import open_executor
from cotenant.execute.threads.lanes import run_gently
from cotenant.measure.campaign import Journal
from cotenant.measure.inputs import make_inputs
from cotenant.measure.load_spec import MEASURED, MEASURING, LoadReport, VersionFacts, VersionSpec, facts_of
from cotenant.measure.opened_model import (
    OpenedModel,
    as_drafted,
    covers,
    follow_gains,
    has_batches,
    is_of,
    judge_rows,
    merged_as,
    open_untried,
    remember_verdict,
)
from cotenant.measure.profile_misfit import profile_misfit
from cotenant.measure.solo import CORES, QUICK, Effort, measure_model
from cotenant.measure.worker_memory import worker_peak_bytes
from cotenant.profiles.device import this_device
from cotenant.profiles.merging import Merging
from cotenant.profiles.profile_file import ModelProfile, Point, load_profile
from cotenant.repository import ModelVersion, profile_path
from cotenant.work import CPU, Share

_log = logging.getLogger("cotenant.server")
ASSUMED_SHARE = 0.5
"""Assumed latency of a model that cannot run on sample values, as a share of its SLO (decision 0050)."""
HINT = "give its inputs values by [samples.INPUT] in its config.toml"
Tell = Callable[[str, VersionFacts | None], None]
"""Called before each step with its name and the facts known so far."""


def load(spec: VersionSpec, tell: Tell = lambda _, __: None) -> LoadReport:
    """Open a version of a model, try whether its queries may be merged, and measure it if no profile holds.

    A model that refuses the sample values gets an assumed profile and a warning. Raises ModelError or ConfigError when
    the version cannot be opened or does not fit its configuration.
    """
    root, found = Path(spec.root), spec.found
    for digest, merging in spec.verdicts.items():
        remember_verdict(digest, merging)
    linux.return_memory()  # of earlier loads
    knows_peak = spec.device is None and linux.reset_peak()
    executor = None if spec.device is None else open_executor(spec.device, spec.shares)
    with nullcontext() if executor is None else closing(executor):
        target = CORES if executor is None else executor.target
        tell("opening its files", None)
        opened = run_gently(partial(open_untried, root, found, target, is_draft=spec.is_draft, faults=spec.faults))
        with closing(opened.runner):
            facts = facts_of(opened)
            warning, is_measured = "", False
            try:
                tried = partial(_tell_trial, tell, facts)
                opened = follow_gains(root, opened, target, spec.shares, tried)
                tell("trying it on sample values", facts)
                opened = judge_rows(root, opened)
                if spec.is_draft:
                    opened = as_drafted(opened)
                facts = facts_of(opened)
                if not spec.shares or spec.effort is not None:
                    run_once(opened)
                if not spec.shares:
                    return LoadReport(facts, assumed_profile(facts, ()))
                if spec.effort is not None:
                    return LoadReport(
                        facts, _profiled(opened, spec, spec.effort, target, partial(_tell_facts, tell, facts))
                    )
                step = partial(_tell_step, tell, facts)
                known = find_profile(root, opened, spec.shares, spec.known)
                is_measured = known is None
                profile = known or measured_quickly(root, opened, spec.shares, target, step)
                if is_measured and knows_peak:
                    profile = replace(profile, memory_bytes=linux.peak_bytes())
            except ModelError as error:
                if spec.effort is not None:
                    raise
                warning = f"it cannot be run on sample values: {' '.join(error.reason.split())}"
                facts, is_measured = untried(facts_of(opened), warning), False
                profile = assumed_profile(facts, spec.shares)
            splits = opened.splits if profile.splits is UNSET else profile.splits
            return LoadReport(structs.replace(facts, splits=splits), profile, warning, is_measured)


def run_once(opened: OpenedModel) -> None:
    """Run one row of sample values at the first declared shape. Raises ModelError."""
    runner, is_batched = opened.runner, opened.found.config.model.max_batch > 1
    runner.prepare([(0, runner.unit_count)])
    runner.run(0, runner.unit_count, make_inputs(runner.inputs, opened.shapes[0], 1, is_batched, opened.samples))


def _profiled(
    opened: OpenedModel, spec: VersionSpec, effort: Effort, target: TargetDevice, tell: Callable[[str], None]
) -> ModelProfile:
    """The profile that is known of this model under any name, with the points that it lacks. Raises ModelError."""
    known = next((each for each in spec.known if _is_known(each, opened)), None)
    if known is not None and covers(known, spec.shares):
        return replace(known, splits=opened.splits, merging=opened.merging, row_bytes=opened.row_bytes)
    tell(f"{MEASURING}it")
    sweep, journal = opened.sweep(spec.shares, effort), Journal(spec.journal)
    measured = measure_model(opened.runner, sweep, journal, lambda text: tell(f"{MEASURED}{text}"), target)
    sizes = {point.cores for point in measured.points}
    others = [point for point in known.points if point.cores not in sizes] if known else []
    points = sorted((*measured.points, *others), key=lambda point: (point.shape, point.cores, point.items))
    peak = partial(worker_peak_bytes, opened, sweep, measured.cuts)
    memory_bytes = max(journal.remember(f"{opened.digest}/memory", peak), known.memory_bytes if known else 0)
    return replace(measured, points=tuple(points), memory_bytes=memory_bytes, row_bytes=opened.row_bytes)


def _is_known(profile: ModelProfile, opened: OpenedModel) -> bool:
    is_same = profile.digest == opened.digest and profile.cuts[-1] == opened.runner.unit_count
    return is_same and has_batches(profile, opened)


def _tell_facts(tell: Tell, facts: VersionFacts, step: str) -> None:
    tell(step, facts)


def _tell_trial(tell: Tell, facts: VersionFacts, what: str) -> None:
    tell(f"{MEASURING}{what}", facts)


def _tell_step(tell: Tell, facts: VersionFacts, _: str) -> None:
    tell(f"{MEASURING}it quickly on sample values", facts)


def find_profile(
    root: Path, opened: OpenedModel, partitions: Sequence[Share], measured: Sequence[ModelProfile] = ()
) -> ModelProfile | None:
    """The valid profile of this model on this device: from the repository, else one of `measured` (quick profiles).

    Row properties (`splits`, `merging`) found by another version of cotenant are dropped: outputs depend on them.
    """
    path = profile_path(root)
    if path.exists():
        try:
            stored = load_profile(path)
        except CotenantError as error:
            _log.warning("%s", error)
        else:
            known = stored.of_digest(opened.found.tenant, opened.digest)
            if known is not None and is_of(known, stored.device, opened) and covers(known, partitions):
                is_ours = stored.device.versions.get("cotenant") == this_device().versions["cotenant"]
                return known if is_ours else replace(known, splits=UNSET, merging=UNSET)
    fitting = (each for each in measured if each.digest == opened.digest and has_batches(each, opened))
    return next((each for each in fitting if covers(each, partitions)), None)


def stored_or_measured(
    root: Path, opened: OpenedModel, partitions: Sequence[Share], target: TargetDevice
) -> ModelProfile:
    """The profile of `find_profile`, else of `measured_quickly`."""
    return find_profile(root, opened, partitions) or measured_quickly(root, opened, partitions, target)


def measured_quickly(
    root: Path,
    opened: OpenedModel,
    partitions: Sequence[Share],
    target: TargetDevice,
    step: Callable[[str], None] = lambda _: None,
) -> ModelProfile:
    """Measure a model without a profile of `find_profile`, quickly and with a warning.

    A profile belongs to a file and its configuration, under any name and version. Raises ModelError when the model
    cannot run on sample values.
    """
    _log.warning(
        "model %r has no valid profile here and is measured quickly: %s",
        opened.found.model,
        profile_misfit(root, opened, partitions),
    )
    step("units")
    return measure_model(opened.runner, opened.sweep(partitions, QUICK), Journal(None), step, target)


def untried(facts: VersionFacts, reason: str) -> VersionFacts:
    """The facts of a model that could not run: merging is refused unless its graph or configuration allows it."""
    if facts.merging.is_allowed or facts.found.config.model.max_batch == 1:
        return facts
    merging = Merging("refused", reason)
    return structs.replace(facts, found=merged_as(facts.found, merging), merging=merging)


def assumed_profile(facts: VersionFacts, partitions: Sequence[Share]) -> ModelProfile:
    """The profile of a model that cannot run on sample values: `ASSUMED_SHARE` of its SLO for any rows and share.

    It has no cuts inside the model, since times of units are unknown. Its points have 0 runs.
    """
    found = facts.found
    latency_ns = max(1, round(found.config.tenant.slo_ms * NS_PER_MS * ASSUMED_SHARE))
    sizes = {share.size for share in partitions} | ({1} if facts.device == CPU else set())
    points = tuple(
        Point(shape, rows, size, 0, latency_ns, latency_ns, latency_ns, latency_ns)
        for shape in range(len(facts.shapes))
        for size in sorted(sizes)
        for rows in row_buckets(found.config.model.max_batch)
    )
    units = (max(1, latency_ns // facts.unit_count),) * facts.unit_count
    return ModelProfile(
        facts.digest, points, units, (0, facts.unit_count), 1.0, splits=facts.splits, merging=facts.merging
    )


def warning_of(found: ModelVersion, why: str) -> str:
    """The warning for a model with an assumed latency."""
    slo_ms = found.config.tenant.slo_ms
    return (
        f"model {found.model!r} version {found.version}: {why}. It is served with an assumed latency of "
        f"{slo_ms * ASSUMED_SHARE:g} ms ({ASSUMED_SHARE:.0%} of its SLO) until launches correct it; {HINT}"
    )
