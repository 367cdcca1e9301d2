"""Profiles a whole repository: every version of every model, resumable, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import UNSET

from cotenant.config import ServerConfig
from cotenant.execute.layout import device_cores, lanes_of
from cotenant.execute.protocol import TargetDevice
from cotenant.execute.registry import open_executor
from cotenant.measure.campaign import Campaign, OnStep, leaving_out, stamp
from cotenant.measure.opened_model import OpenedModel, covers, has_batches, open_all
from cotenant.measure.solo import Effort, measure_model
from cotenant.measure.verdict import ModelVerdict, problems_of
from cotenant.measure.worker_memory import worker_peak_bytes
from cotenant.policies.registry import make_policy
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Profile, load_profile, save_profile
from cotenant.repository import profile_path, readable_versions
from cotenant.repository.measured_content import content_of
from cotenant.work import Share


def profile_repository(
    root: Path,
    settings: ServerConfig,
    effort: Effort,
    *,
    fresh: bool,
    on_step: OnStep,
    partitions: Sequence[Share] = (),
    verdicts: Sequence[ModelVerdict] = (),
) -> tuple[Profile, dict[str, str]]:
    """Measure the missing points of a repository's profile, save it, and return it with the errors of omitted models.

    Models are measured at the sizes of the server's lanes and of `partitions`. `fresh` discards earlier results. An
    interrupted sweep is resumed: each point is on disk as soon as it is measured. A profile of another device is
    replaced. Models with a problem by `verdicts` are left out with all their problems.
    """
    lanes = (*served_shares(settings), *partitions)
    with closing(open_executor(settings.device, lanes)) as executor:
        return _profile(root, executor.target, lanes, effort, verdicts, fresh=fresh, on_step=on_step)


def served_shares(settings: ServerConfig) -> tuple[Share, ...]:
    """The shares that launches of the server may get: its lanes, and shares of its policy."""
    lanes = lanes_of(settings.device, device_cores(settings.device))
    return make_policy(settings.policy.name, settings.policy.options, lanes).spec.shares


def _profile(
    root: Path,
    target: TargetDevice,
    lanes: Sequence[Share],
    effort: Effort,
    verdicts: Sequence[ModelVerdict],
    *,
    fresh: bool,
    on_step: OnStep,
) -> tuple[Profile, dict[str, str]]:
    campaign = Campaign(profile_path(root), this_device(target.device), fresh=fresh)
    before = campaign.known(load_profile, lambda found: found.device.fingerprint)
    # computed before models are opened, so that later changes are found
    contents = {(each.model, each.version): content_of(each) for each in readable_versions(root)}
    campaign.errors |= problems_of(verdicts)

    def facts_of(opened: OpenedModel) -> dict[str, Any]:
        return {"content": contents.get(_key(opened), UNSET), "row_bytes": opened.row_bytes}

    good = {each.model for each in verdicts if not each.problems} if verdicts else None
    opened = open_all(root, campaign.errors, target, lanes, good)
    profiles = {
        name: replace(known, splits=each.splits, merging=each.merging, **facts_of(each))
        for name, each in opened.items()
        if before is not None and (known := _known(before, each)) is not None
    }
    todo = {name: each for name, each in opened.items() if name not in profiles or not covers(profiles[name], lanes)}
    for name, each in opened.items():
        if name not in todo:
            each.runner.close()
    total = sum(each.sweep(lanes, effort).steps for each in todo.values())
    steps = count(1)
    on_step(0, total, "")

    def progress(text: str) -> None:
        on_step(next(steps), total, text)

    def save() -> Profile:
        server = UNSET if before is None else before.server
        profile = Profile(campaign.device, *stamp(), dict(sorted(profiles.items())), server=server)
        save_profile(campaign.path, profile)
        return profile

    for name, each in todo.items():
        with closing(each.runner), leaving_out(campaign.errors, each.found.model):
            wanted = each.sweep(lanes, effort)
            measured = measure_model(each.runner, wanted, campaign.journal, progress, target)
            key, peak = f"{each.digest}/memory", partial(worker_peak_bytes, each, wanted, measured.cuts)
            measured = replace(measured, memory_bytes=campaign.journal.remember(key, peak))
            profiles[name] = replace(_with_others(measured, profiles.get(name)), **facts_of(each))
            save()
    profile = save()
    campaign.journal.remove()
    return profile, campaign.errors


def _key(opened: OpenedModel) -> tuple[str, int]:
    return opened.found.model, opened.found.version


def _known(before: Profile, opened: OpenedModel) -> ModelProfile | None:
    """The profile with this model's digest, under any name."""
    known = before.of_digest(opened.found.tenant, opened.digest)
    if known is None or known.cuts[-1] != opened.runner.unit_count or not has_batches(known, opened):
        return None
    return known


def _with_others(measured: ModelProfile, before: ModelProfile | None) -> ModelProfile:
    """The profile with the earlier points at other partition sizes, and the larger of both peaks of memory."""
    sizes = {point.cores for point in measured.points}
    others = [point for point in before.points if point.cores not in sizes] if before else []
    points = sorted((*measured.points, *others), key=lambda point: (point.shape, point.cores, point.items))
    peak = max(measured.memory_bytes, before.memory_bytes if before else 0)
    return replace(measured, points=tuple(points), memory_bytes=peak)
