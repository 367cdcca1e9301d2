"""Verdicts on the models of a repository: what keeps a model from being served, and what puts its SLO in doubt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from cotenant.config import NS_PER_MS, ServerConfig
from cotenant.errors import CotenantError
from cotenant.measure.load_spec import LoadReport, VersionSpec
from cotenant.measure.loader import warning_of
from cotenant.measure.loader_process import LoadCancelledError, Loader
from cotenant.measure.opened_model import adding, remember_verdict
from cotenant.profiles.profile_file import ModelProfile, Point, Profile, disturbed_words
from cotenant.repository import ModelVersion, check_owners, examine, load_order
from cotenant.repository.measured_content import changes

LoadVersion = Callable[[ModelVersion, tuple[str, ...]], LoadReport]
"""Opens a version beside known problems of its configuration, and raises CotenantError with all of them."""


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """Verdict on a version of a model; `version` is "" where there is none.

    Sentences with remedies: `problems` keep the version from being served, or its profile from being used; `warnings`
    do not. `report` is of a version that can be loaded.
    """

    model: str
    version: str = ""
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    found: ModelVersion | None = None
    report: LoadReport | None = None


def problems_of(verdicts: Sequence[ModelVerdict]) -> dict[str, str]:
    """The problems of each version that has some, a line each; by model, with the version where it has several."""
    count = Counter(each.model for each in verdicts)
    return {
        each.model if count[each.model] == 1 else f"{each.model} {each.version}": "\n".join(each.problems)
        for each in verdicts
        if each.problems
    }


def judge_repository(
    root: Path, settings: ServerConfig, models: Iterable[str], profile: Profile | None = None, *, stale: bool = False
) -> list[ModelVerdict]:
    """The verdicts on `models`, by name and version. Each is opened, checked and run once in a child process.

    Beside the stored `profile`, a version that changed since it was measured has a problem, unless `stale`. An SLO
    below the time of one query is a warning.
    """
    device = settings.device.gpu
    with closing(Loader(settings.server.load_limit_s, is_quiet=True)) as loader:

        def load(found: ModelVersion, faults: tuple[str, ...]) -> LoadReport:
            return loader.load(VersionSpec(str(root), found, device=device, faults=faults))

        made = judge_models(root, models, load, loader.most)
    if profile is not None:
        changed = {} if stale else changes(root, profile.contents)
        made = [_beside_profile(each, profile, changed, root) for each in made]
    return made


def judge_models(root: Path, models: Iterable[str], load: LoadVersion, most: int = 1) -> list[ModelVerdict]:
    """The verdicts on `models`, by name and version. At most `most` models are loaded at the same time.

    `load` is as for `judge`.
    """
    owners: dict[str, str] = {}

    def one(model: str) -> list[ModelVerdict]:
        made = judge(root, model, lambda found: check_owners(found, owners), load)
        owners.update({each.found.tenant: model for each in made if each.found is not None and each.report})
        return made

    first, rest = load_order(root, models)
    if most > 1:
        with ThreadPoolExecutor(most) as pool:
            judged = [*pool.map(one, first)]
    else:
        judged = [*map(one, first)]
    found = [verdict for made in (*judged, *map(one, rest)) for verdict in made]
    for each in found:
        if each.report is not None and each.report.facts.found.config.model.max_batch > 1:
            remember_verdict(each.report.facts.digest, each.report.facts.merging)
    return sorted(found, key=lambda each: (each.model, int(each.version or 0)))


def judge(
    root: Path,
    model: str,
    check: Callable[[Sequence[ModelVersion]], None],
    load: LoadVersion,
) -> list[ModelVerdict]:
    """The verdicts on the versions of a model, newest first. The newest that loads is the default one.

    `check` raises ConfigError for tenants that belong to others. Raises LoadCancelledError.
    """
    unreadable: dict[str, str] = {}
    faults: list[str] = []
    versions: tuple[ModelVersion, ...] = ()
    with adding(faults):
        versions = examine(root, model, unreadable, faults)
        if versions:
            check(versions)
    made: list[ModelVerdict] = []
    for found in reversed(versions[-1:] if faults else versions):
        found = replace(found, is_default=not any(each.report for each in made))
        try:
            report = load(found, tuple(faults))
        except LoadCancelledError:
            raise
        except CotenantError as error:
            made.append(ModelVerdict(model, str(found.version), error.problems, found=found))
        else:
            made.append(ModelVerdict(model, str(found.version), (), tuple(_doubts(found, report)), found, report))
    if faults and not versions:
        made.append(ModelVerdict(model, "", tuple(faults)))
    return made + [ModelVerdict(model, version, (reason,)) for version, reason in unreadable.items()]


def _doubts(found: ModelVersion, report: LoadReport) -> Iterator[str]:
    """Warnings of a load: latencies are assumed, queries run alone, or are merged without a proof."""
    merging = report.facts.merging
    if report.warning:
        yield warning_of(found, report.warning)
    elif merging.verdict == "refused":
        yield f"queries run alone (max_batch 1 instead of {found.config.model.max_batch}): {merging.reason}"
    elif merging.verdict == "trusted":
        yield f"queries are merged unproven: {merging.reason}"


def _beside_profile(verdict: ModelVerdict, profile: Profile, changed: Mapping[str, str], root: Path) -> ModelVerdict:
    """The verdict with what the stored profile says of the version; `changed` says why it is stale, by tenant."""
    found = verdict.found
    known = profile.models.get(found.tenant) if found is not None else None
    if found is None or known is None or verdict.problems:
        return verdict
    if change := changed.get(found.tenant):
        return replace(verdict, problems=(f"its profile is stale: {change}. Run 'cotenant profile {root}'",))
    warnings = filter(None, (slow_words(known, found.config.tenant.slo_ms), disturbed_words(known, root)))
    return replace(verdict, warnings=(*verdict.warnings, *warnings))


def slow_words(profile: ModelProfile, slo_ms: float) -> str:
    """A warning where one query at its fastest takes longer than the SLO; "" elsewhere.

    A query takes the measured p99, or the longest run where the runs are too few for a p99.
    """
    slow = [point for point in fastest(profile).values() if point.p99_ns > slo_ms * NS_PER_MS]
    if not slow:
        return ""
    worst = max(slow, key=lambda point: point.p99_ns)
    shape = f" of shape {worst.shape}" if any(point.shape for point in profile.points) else ""
    least_ms = worst.p99_ns / NS_PER_MS
    return (
        f"its SLO of {slo_ms:g} ms is below the time of one query{shape} by its profile, {least_ms:.3g} ms "
        f"({worst.origin('p99')}): "
        f"set slo_ms to more than {least_ms:.3g} below [tenant]"
    )


def fastest(profile: ModelProfile) -> dict[int, Point]:
    """The point of one row with the least p99 (or longest run), by shape."""
    best: dict[int, Point] = {}
    for point in profile.points:
        if point.items == 1 and (point.shape not in best or point.p99_ns < best[point.shape].p99_ns):
            best[point.shape] = point
    return best
