"""Profiles a whole repository: every version of every model, resumable, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from msgspec import UNSET

from cotenant.config import ServerConfig
from cotenant.execute.batches import row_buckets
from cotenant.execute.layout import device_cores, lanes_of
from cotenant.measure.campaign import Campaign, OnStep, stamp
from cotenant.measure.load_spec import MEASURED, LoadReport, VersionSpec
from cotenant.measure.loader_process import Loader
from cotenant.measure.opened_model import names_to_profile
from cotenant.measure.solo import Effort
from cotenant.measure.verdict import judge_models, problems_of
from cotenant.policies.registry import make_policy
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import Profile, load_profile, save_profile
from cotenant.repository import ModelVersion, profile_path, readable_versions
from cotenant.repository.measured_content import changes, content_of
from cotenant.work import CPU, Share


def profile_repository(
    root: Path,
    settings: ServerConfig,
    effort: Effort,
    *,
    fresh: bool,
    on_step: OnStep,
    partitions: Sequence[Share] = (),
    loader: Loader | None = None,
) -> tuple[Profile, dict[str, str]]:
    """Measure the missing points of a repository's profile, save it, and return it with the errors of omitted models.

    Each version is opened, judged and measured in a child process, one after another. Omitted models have all their
    problems, as `judge_models` finds them. Models are measured at the sizes of the server's lanes and of `partitions`.

    `fresh` discards earlier results. An interrupted sweep is resumed: each point is on disk as soon as it is measured.
    A profile of another device is replaced. Raises ConfigError when there is no model.
    """
    names = names_to_profile(root)
    shares = (*served_shares(settings), *partitions)
    campaign = Campaign(profile_path(root), this_device(shares[0].device), fresh=fresh)
    before = campaign.known(load_profile, lambda found: found.device.fingerprint)
    # computed before models are opened, so that later changes are found
    versions = {(each.model, each.version): each for each in readable_versions(root)}
    contents = {key: content_of(each) for key, each in versions.items()}
    earlier = dict(before.models) if before is not None else {}
    profiles = {each.tenant: earlier[each.tenant] for each in versions.values() if each.tenant in earlier}
    progress = _Progress({key: _steps(each, shares) for key, each in versions.items()}, on_step)

    def save() -> Profile:
        server = UNSET if before is None else before.server
        profile = Profile(campaign.device, *stamp(), dict(sorted(profiles.items())), server=server)
        save_profile(campaign.path, profile)
        return profile

    def load(found: ModelVersion, faults: tuple[str, ...]) -> LoadReport:
        own = [earlier[found.tenant]] if found.tenant in earlier else []
        try:
            report = model_loader.load(
                VersionSpec(
                    str(root),
                    found,
                    shares,
                    (*own, *earlier.values()),
                    settings.device.gpu,
                    faults=faults,
                    effort=effort,
                    journal=campaign.journal.path,
                )
            )
        finally:
            progress.end((found.model, found.version))
        content = contents.get((found.model, found.version), UNSET)
        profiles[found.tenant] = replace(report.profile, content=content)
        save()
        return report

    with closing(loader or Loader(settings.server.load_limit_s)) as model_loader:
        model_loader.on_step = progress.on_load
        verdicts = judge_models(root, names, load)
    campaign.errors |= problems_of(verdicts)
    good = {each.found.tenant for each in verdicts if each.found is not None and each.report is not None}
    stale = changes(root, {name: model.content for name, model in profiles.items() if name not in good})
    for name in profiles.keys() & stale.keys():
        del profiles[name]
    profile = save()
    campaign.journal.remove()
    return profile, campaign.errors


class _Progress:
    """Counts the measurements of a campaign. `expected` are those of each version, by its configuration."""

    def __init__(self, expected: dict[tuple[str, int], int], on_step: OnStep) -> None:
        self._expected, self._on_step = expected, on_step
        self._done = self._done_before = 0
        self._tell("")

    def on_load(self, model: str, step: str) -> None:
        """A step of a load begins: see `Loader.on_step`."""
        if step.startswith(MEASURED):
            self._done += 1
            self._tell(step.removeprefix(MEASURED))

    def end(self, version: tuple[str, int]) -> None:
        """A version needs no more measurements; it may have been known, or have a problem."""
        counted, self._done_before = self._done - self._done_before, self._done
        if self._expected.get(version) != counted:
            self._expected[version] = counted
            self._tell("")

    def _tell(self, text: str) -> None:
        self._on_step(self._done, max(self._done, sum(self._expected.values())), text)


def _steps(found: ModelVersion, shares: Sequence[Share]) -> int:
    """Measurements of a version, if it is merged as configured: see `Sweep.steps`."""
    model, sizes = found.config.model, {share.size for share in shares} | ({1} if shares[0].device == CPU else set())
    return (len(model.shapes) or 1) * len(row_buckets(model.max_batch)) * len(sizes) + 2


def served_shares(settings: ServerConfig) -> tuple[Share, ...]:
    """The shares that launches of the server may get: its lanes, and shares of its policy."""
    lanes = lanes_of(settings.device, device_cores(settings.device))
    return make_policy(settings.policy.name, settings.policy.options, lanes).spec.shares
