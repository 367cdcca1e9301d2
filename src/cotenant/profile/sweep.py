"""Profiling a whole repository: every version of every model, resumable, with progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cotenant.config import ServerConfig, device_cores, lanes_of, make_policy
from cotenant.errors import ConfigError, CotenantError
from cotenant.profile.device import this_device
from cotenant.profile.measure import Effort, Journal, measure_model
from cotenant.profile.opening import OpenedModel, covers, open_version
from cotenant.profile.place import Place, open_place
from cotenant.profile.table import ModelProfile, Profile, ProfileError, load_profile, save_profile
from cotenant.repository import CONFIG_FILE, MODEL_FILE, check_owners, find_versions, model_names, profile_path
from cotenant.types import Partition

OnStep = Callable[[int, int, str], None]
"""Told (steps done, steps in all, what was measured)."""


def profile_repository(
    root: Path,
    settings: ServerConfig,
    effort: Effort,
    *,
    fresh: bool,
    on_step: OnStep,
    partitions: Sequence[Partition] = (),
) -> tuple[Profile, dict[str, str]]:
    """Measure what the profile of a repository lacks, save it, and give it with the errors of models left out.

    Models are measured at the sizes of the server's lanes, and of `partitions`. `fresh` forgets what is known. A sweep
    that is interrupted goes on where it stopped: each point is on disk as soon as it is measured. A profile of another
    device is replaced.
    """
    lanes = make_policy(settings.policy, lanes_of(settings.device, device_cores(settings.device))).partitions
    lanes = (*lanes, *partitions)
    place = open_place(settings.device, lanes)
    try:
        return _profile(root, place, lanes, effort, fresh=fresh, on_step=on_step)
    finally:
        place.close()


def _profile(
    root: Path, place: Place, lanes: Sequence[Partition], effort: Effort, *, fresh: bool, on_step: OnStep
) -> tuple[Profile, dict[str, str]]:
    path = profile_path(root)
    device = this_device(place.device)
    unfinished = path.with_name(f"profile-{device.fingerprint}.journal")
    if fresh:
        unfinished.unlink(missing_ok=True)
    journal = Journal(unfinished)
    known = {} if fresh else _known(path, device.fingerprint)
    opened, errors = _open_all(root, place.device)
    profiles = {each.found.tenant: known[each.found.tenant] for each in opened if _is_known(known, each)}
    todo = [each for each in opened if not _is_covered(profiles.get(each.found.tenant), lanes)]
    for each in opened:
        if each not in todo:
            each.runner.close()
    total = sum(each.sweep(lanes, effort).steps for each in todo)
    done = 0
    on_step(done, total, "")

    def step(text: str) -> None:
        nonlocal done
        done += 1
        on_step(done, total, text)

    profile = Profile(device, now_text(), this_command(), profiles)
    for each in todo:
        name = each.found.tenant
        try:
            measured = measure_model(each.runner, each.sweep(lanes, effort), journal, step, place)
            profiles[name] = _with_others(measured, profiles.get(name))
        except CotenantError as error:
            errors[each.found.model] = str(error)
        finally:
            each.runner.close()
        profile = Profile(device, now_text(), this_command(), dict(sorted(profiles.items())))
        save_profile(path, profile)
    save_profile(path, profile)
    journal.remove()
    return profile, errors


def _open_all(root: Path, device: str) -> tuple[list[OpenedModel], dict[str, str]]:
    opened: list[OpenedModel] = []
    errors: dict[str, str] = {}
    names = model_names(root)
    if not names:
        raise ConfigError(
            f"{root}: holds no models to profile, expected directories with {CONFIG_FILE} and 1/{MODEL_FILE} "
            "(or model.pt2)"
        )
    owners: dict[str, str] = {}
    for name in names:
        try:
            versions = find_versions(root, name)
            check_owners(versions, owners)
            opened += [open_version(root, found, device) for found in versions]
            owners.update({found.tenant: name for found in versions})
        except CotenantError as error:
            errors[name] = str(error)
    return opened, errors


def _known(path: Path, fingerprint: str) -> dict[str, ModelProfile]:
    if not path.exists():
        return {}
    try:
        profile = load_profile(path)
    except ProfileError:
        return {}
    return profile.models if profile.device.fingerprint == fingerprint else {}


def _is_known(known: dict[str, ModelProfile], opened: OpenedModel) -> bool:
    """Whether the profile is of this very model."""
    profile = known.get(opened.found.tenant)
    return profile is not None and profile.digest == opened.digest and profile.cuts[-1] == opened.runner.unit_count


def _is_covered(profile: ModelProfile | None, lanes: Sequence[Partition]) -> bool:
    return profile is not None and covers(profile, lanes)


def _with_others(measured: ModelProfile, before: ModelProfile | None) -> ModelProfile:
    """With what was measured before at other sizes of partition."""
    sizes = {point.cores for point in measured.points}
    others = [point for point in before.points if point.cores not in sizes] if before else []
    points = sorted((*measured.points, *others), key=lambda point: (point.shape, point.cores, point.items))
    return replace(measured, points=tuple(points))


def now_text() -> str:
    """The present time as results carry it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def this_command() -> str:
    """The command line as results carry it."""
    return " ".join(["cotenant", *sys.argv[1:]])
