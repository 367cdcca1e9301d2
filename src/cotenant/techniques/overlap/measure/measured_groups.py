"""Measurement of groups of segments on server lanes, and the fit of the overlap-aware predictor.

Members start together behind a barrier, each on a lane with cores of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from cotenant.config import ServerConfig
from cotenant.core.predictor import Group, Member
from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.layout import cores_alone, lanes_of
from cotenant.execute.threads.lanes import Lane
from cotenant.measure.campaign import Campaign, OnStep, leaving_out, stamp
from cotenant.measure.inputs import make_inputs
from cotenant.measure.opened_model import OpenedModel, open_profiled
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import Profile
from cotenant.repository import groups_path, overlap_path
from cotenant.techniques.overlap.group_samples import (
    GroupSample,
    SamplesError,
    SamplesHeader,
    load_samples,
    save_samples,
)
from cotenant.techniques.overlap.measure.group_sampler import sample_groups
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import TenantFacts
from cotenant.techniques.overlap.predict.overlap_file import OverlapFileError, read_overlap, save_overlap
from cotenant.techniques.overlap.predict.overlap_fit import FEWEST_SAMPLES, fit_overlap
from cotenant.types import Tenant
from cotenant.work import Share

_PATIENCE_S = 60.0
"""Longest wait of members for each other; then the run has failed."""
_KEPT_INPUTS = 64
"""Inputs of segments in the cache at most."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class GroupEffort:
    """Limits of a measurement: `count` groups, `runs` times each after `warm_up` runs, and `budget_s` seconds."""

    count: int = 400
    runs: int = 7
    warm_up: int = 1
    budget_s: float = 600.0


def measure_groups(
    root: Path, settings: ServerConfig, profile: Profile, effort: GroupEffort, *, fresh: bool, on_step: OnStep
) -> tuple[list[GroupSample], dict[str, str]]:
    """Measure groups of the profiled models of a repository and save them. Returns samples, and errors by model.

    Earlier samples stay while device and models are the same; an interrupted sweep continues. Raises ConfigError when
    no model of the repository has a profile for this device.
    """
    cores = cores_alone(settings.device, "groups are measured", str(root))
    campaign = Campaign(groups_path(root), this_device(), fresh=fresh)
    samples: dict[Group, GroupSample] = {}
    with open_profiled(root, profile, campaign.errors) as opened:
        digests = {name: each.digest for name, each in opened.items()}
        before = campaign.known(load_samples, lambda found: found[0].fingerprint)
        if before is not None:
            samples = {each.members: each for each in _still_valid(before[1], before[0].digests, digests)}
        lanes = lanes_of(settings.device, cores)
        groups = _drawn(profile, opened, lanes, effort.count)
        until = time.monotonic() + effort.budget_s
        with _Bench(opened, profile, lanes) as bench:
            for done, group in enumerate(groups):
                on_step(done, len(groups), " + ".join(f"{m.work.tenant} {m.work.start}..{m.work.end}" for m in group))
                if group in samples or time.monotonic() >= until:
                    continue
                key = "/".join([*(digests[member.work.tenant] for member in group), *map(str, group)])
                with leaving_out(campaign.errors, "+".join(member.work.tenant for member in group)):
                    runs = campaign.journal.remember(key, partial(bench.measure, group, effort))
                    samples[group] = GroupSample(group, tuple(runs))
        on_step(len(groups), len(groups), f"{len(samples)} groups")
    found = list(samples.values())
    save_samples(campaign.path, SamplesHeader(campaign.device.fingerprint, *stamp(), digests), found)
    campaign.journal.remove()
    return found, campaign.errors


def fit_groups(root: Path, profile: Profile, *, on_step: Callable[[int, int], None] | None = None) -> OverlapPredictor:
    """Fit a predictor to the measured groups of a repository and save it beside them.

    Raises SamplesError when there are none, or too few.
    """
    path = groups_path(root)
    header, samples = load_samples(path)
    facts = facts_of(profile)
    usable = _still_valid(samples, header.digests, {name: model.digest for name, model in profile.models.items()})
    if len(usable) < FEWEST_SAMPLES:
        raise SamplesError(
            f"{path}: holds {len(usable)} groups of the present models, expected {FEWEST_SAMPLES} or more"
        )
    predictor = fit_overlap(
        usable,
        facts,
        seed=_SEED,
        on_step=on_step,
        fingerprint=header.fingerprint,
        created=header.created,
        command=header.command,
        digests=tuple(sorted(header.digests.items())),
    )
    save_overlap(overlap_path(root), predictor)
    return predictor


def load_overlap(root: Path, profile: Profile, *, quantile: float = 0.5) -> OverlapPredictor:
    """The fitted predictor of a repository for the models in `profile`; models in no group count as unseen.

    Raises OverlapFileError for a missing or unreadable file, and for one fitted on another device.
    """
    path = overlap_path(root)
    predictor = read_overlap(path, quantile)
    if predictor.model.fingerprint != profile.device.fingerprint:
        raise OverlapFileError(f"{path}: was fitted on another device; run 'cotenant profile --groups' anew")
    then = dict(predictor.model.digests)
    changed = [name for name, model in profile.models.items() if then.get(name) != model.digest]
    return predictor.with_unseen([TenantFacts(name, profile.models[name].table("p50")) for name in changed])


def facts_of(profile: Profile) -> list[TenantFacts]:
    """The predictor's input for each tenant of a profile."""
    return [TenantFacts(name, model.table("p50")) for name, model in sorted(profile.models.items())]


def _drawn(profile: Profile, opened: dict[str, OpenedModel], lanes: Sequence[Share], count: int) -> list[Group]:
    tenants = [Tenant(name, 1, cuts=profile.models[name].cuts) for name in sorted(opened)]
    sizes = {name: sorted({point.items for point in profile.models[name].points}) for name in opened}
    shapes = {name: len(each.shapes) for name, each in opened.items()}
    drawn = sample_groups(tenants, sizes, [lane.size for lane in lanes], count, _SEED, shapes=shapes, repeat=True)
    return list(dict.fromkeys(drawn))


def _still_valid(samples: Sequence[GroupSample], then: dict[str, str], now: dict[str, str]) -> list[GroupSample]:
    """Samples of which all models are present and unchanged."""
    return [
        sample
        for sample in samples
        if all(m.work.tenant in now and then.get(m.work.tenant) == now[m.work.tenant] for m in sample.members)
    ]


class _Bench:
    """Runs groups on lanes, with a cache of the input tensors of segments."""

    def __init__(self, opened: dict[str, OpenedModel], profile: Profile, lanes: Sequence[Share]) -> None:
        self._opened = opened
        self._profile = profile
        self._cores = [lane.cores for lane in lanes]
        self._lanes: dict[Share, Lane] = {}
        self._inputs: dict[tuple[str, int, int, int], Any] = {}

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *error: object) -> None:
        for lane in self._lanes.values():
            lane.close()

    def measure(self, group: Group, effort: GroupEffort) -> list[int]:
        """Latencies of the runs of a group, in ns. Raises CotenantError when a member cannot run."""
        partitions = self._partitions(group)
        work = [self._work(member, partition) for member, partition in zip(group, partitions, strict=True)]
        runs = [self._run(work, partitions) for _ in range(effort.warm_up + effort.runs)]
        return runs[effort.warm_up :]

    def _run(self, work: Sequence[Callable[[], object]], partitions: Sequence[Share]) -> int:
        barrier = threading.Barrier(len(work))
        ends: list[tuple[int, int]] = []
        failures: list[Exception] = []
        left = threading.Semaphore(0)

        def member(task: Callable[[], object]) -> None:
            try:
                barrier.wait(_PATIENCE_S)
                began = time.perf_counter_ns()
                task()
                ends.append((began, time.perf_counter_ns()))
            except Exception as error:
                barrier.abort()
                failures.append(error)
            finally:
                left.release()

        for task, partition in zip(work, partitions, strict=True):
            lane = self._lanes.get(partition)
            if lane is None:
                lane = self._lanes[partition] = Lane(partition)
            lane.put(partial(member, task))
        for _ in work:
            left.acquire()
        if failures:
            first = next((each for each in failures if isinstance(each, CotenantError)), failures[0])
            raise ConfigError(f"a member of the group failed: {first}")
        return max(1, max(end for _, end in ends) - min(began for began, _ in ends))

    def _work(self, member: Member, partition: Share) -> Callable[[], object]:
        model = self._opened[member.work.tenant].runner
        threads = partition.cores if partition.size > 1 else 1
        cuts = self._profile.models[member.work.tenant].cuts
        model.prepare([(0, model.unit_count), *pairwise(cuts)], threads)
        return partial(model.run, member.work.start, member.work.end, self._tensors(member), threads)

    def _tensors(self, member: Member) -> Any:
        key = member.work.tenant, member.work.shape, member.work.items, member.work.start
        found = self._inputs.get(key)
        if found is None:
            opened = self._opened[member.work.tenant]
            is_batched = opened.found.config.model.max_batch > 1
            shape = opened.shapes[member.work.shape]
            found = make_inputs(opened.runner.inputs, shape, member.work.items, is_batched, opened.samples)
            if member.work.start:
                found = opened.runner.run(0, member.work.start, found)
            while len(self._inputs) >= _KEPT_INPUTS:
                del self._inputs[next(iter(self._inputs))]
            self._inputs[key] = found
        return found

    def _partitions(self, group: Group) -> list[Share]:
        """Adjacent lanes for each member, in the sampler's split."""
        lanes = iter(self._cores)
        made = []
        for member in group:
            cores: tuple[int, ...] = ()
            while len(cores) < member.size:
                cores += next(lanes)
            made.append(Share(cores))
        return made
