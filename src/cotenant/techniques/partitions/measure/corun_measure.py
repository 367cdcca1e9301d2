"""Measures co-runs of a repository within a time budget.

1. Measure every model beside antagonists: its largest slowdown, and the slowdown that it causes.
2. Measure the co-runs of largest information gain (`corun_sampler`). Every fifth one is random instead, as a test set.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.config import NS_PER_MS, DeviceSection, ServerConfig
from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.layout import cores_alone, device_cores
from cotenant.measure.antagonist import ARRAY_BYTES
from cotenant.measure.campaign import Campaign, Journal, OnStep, leaving_out, stamp
from cotenant.measure.opened_model import OpenedModel, open_profiled
from cotenant.measure.solo import quantile_ns
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import Profile
from cotenant.repository import coruns_path
from cotenant.techniques.partitions.coruns import (
    ANTAGONIST,
    CoRunner,
    CoRunProfile,
    CoRunRow,
    Timed,
    load_coruns,
    runs_of,
    save_coruns,
)
from cotenant.techniques.partitions.measure.corun_sampler import CoRunSampler, Launches, sides
from cotenant.techniques.partitions.measure.corun_sampler import Side as Question
from cotenant.techniques.partitions.measure.corun_side import Side, loop_together, within
from cotenant.work import Share

Split = tuple[int, ...]
RANDOM_EVERY = 5
"""One in so many co-runs is drawn at random."""
ANTAGONIST_SHARE = 1 / 3
"""Largest share of the budget for co-runs with antagonists."""
MOST_CANDIDATES = 1000
_SLOWER = 1.3
"""Expected slowdown, for choosing the length of a loop."""
_EXTRA_ROUNDS = 5
_SEED = 0


@dataclass(frozen=True, slots=True)
class CoRunEffort:
    """Effort of a measurement: `budget_s` in all. Each co-run has `rounds` alternating loops of about `runs` launches
    together and at least `window_s` each. `array_bytes`: size of the array that an antagonist copies."""

    budget_s: float = 120.0
    runs: int = 12
    rounds: int = 2
    window_s: float = 0.15
    array_bytes: int = ARRAY_BYTES


def partitions_of(section: DeviceSection, splits: Sequence[Split]) -> tuple[Share, ...]:
    """Shares to profile: the partitions of all splits, on consecutive cores, and the whole device.

    Raises ConfigError for a split that does not fit the device.
    """
    cores = device_cores(section)
    found = [part for split in splits for part in _cut(cores, split)]
    return tuple(dict.fromkeys((*found, Share(cores))))


def measure_coruns(
    root: Path,
    settings: ServerConfig,
    profile: Profile,
    splits: Sequence[Split],
    effort: CoRunEffort,
    *,
    fresh: bool,
    on_step: OnStep,
) -> tuple[CoRunProfile, dict[str, str]]:
    """Measure co-runs of profiled models in the partitions of splits, save them, and return all valid ones.

    New co-runs are added to valid earlier ones; an interrupted measurement is continued. `on_step` receives seconds.
    Also returns the errors of skipped co-runs.

    Raises ConfigError for a device that is not a CPU, and for splits that do not fit it or have one partition only.
    Raises it also without a valid profile.
    """
    cores = cores_alone(settings.device, "co-runs are measured", str(root))
    for split in splits:
        _cut(cores, split)
    wanted = [split for split in splits if len(split) > 1]
    if not wanted:
        raise ConfigError("--corun: a co-run needs two partitions or more, as in --partitions 1,1")
    campaign = Campaign(coruns_path(root), this_device(), fresh=fresh)
    with open_profiled(root, profile, campaign.errors) as opened:
        digests = {name: each.digest for name, each in opened.items()}
        targets = _targets(root, opened, profile, wanted)
    before = campaign.known(load_coruns, lambda found: found.device.fingerprint)
    rows = list(before.still_valid(digests)) if before is not None else []
    kept, spent_s = _unfinished(campaign.journal, digests)
    rows += [row for row in kept if row not in rows]  # if it was killed between saving and removing the journal
    budget = round(effort.budget_s)
    with _Bench(root, cores, effort, targets) as bench:
        for launches, chosen in _agenda(wanted, targets, rows, bench, effort):
            on_step(min(round(spent_s), budget), budget, _text(launches))
            if spent_s >= effort.budget_s:
                break
            began = time.monotonic()
            found: list[CoRunRow] = []
            with leaving_out(campaign.errors, _text(launches)):
                found = bench.measure(launches, chosen)
            seconds = time.monotonic() - began
            spent_s += seconds
            if found:
                same = {name: digests[name] for name, _, _ in launches if name in digests}
                entry = {"digests": same, "seconds": seconds, "rows": [asdict(row) for row in found]}
                campaign.journal.put("/".join(map(str, launches)), entry)
                rows += found
    on_step(budget, budget, f"{len(runs_of(rows))} co-runs")
    made = CoRunProfile(campaign.device, *stamp(), digests, tuple(rows))
    save_coruns(campaign.path, made)
    campaign.journal.remove()
    return made, campaign.errors


def _cut(cores: tuple[int, ...], split: Split) -> tuple[Share, ...]:
    if not split or min(split) < 1 or sum(split) > len(cores):
        raise ConfigError(
            f"--partitions: {','.join(map(str, split))!r} needs {sum(split)} cores, "
            f"expected sizes from 1 that add up to at most {len(cores)}"
        )
    starts = [sum(split[:at]) for at in range(len(split))]
    return tuple(Share(cores[start : start + size]) for start, size in zip(starts, split, strict=True))


def _targets(
    root: Path, opened: Mapping[str, OpenedModel], profile: Profile, splits: Sequence[Split]
) -> dict[CoRunner, int]:
    """Profiled latency in ns of each (tenant, batch, size) that a plan may have: at most half the SLO.

    A row waits for a duty cycle, which is at least as long as its batch.
    """
    found: dict[CoRunner, int] = {}
    sizes = sorted({size for split in splits for size in split})
    for name, each in sorted(opened.items()):
        for size in sizes:
            found |= _batches(name, size, each, profile)
    missing = [size for size in sizes if all(key[2] != size for key in found)]
    if missing:
        raise ConfigError(
            f"{root}: no model was profiled on {missing[0]} core(s); run 'cotenant profile --partitions' with this size"
        )
    return found


def _batches(name: str, size: int, opened: OpenedModel, profile: Profile) -> dict[CoRunner, int]:
    points = [point for point in profile.models[name].points if point.cores == size]
    latencies = {
        items: max(point.p50_ns for point in points if point.items == items)
        for items in sorted({point.items for point in points})
    }
    slo_ns = opened.found.config.tenant.slo_ms * NS_PER_MS
    return {(name, items, size): ns for items, ns in latencies.items() if 2 * ns <= slo_ns or items == min(latencies)}


def _unfinished(journal: Journal, digests: Mapping[str, str]) -> tuple[list[CoRunRow], float]:
    """Rows of an interrupted measurement for unchanged models, and its spent seconds."""
    rows: list[CoRunRow] = []
    seconds = 0.0
    for entry in journal.values():
        try:
            if all(digests.get(name) == digest for name, digest in entry["digests"].items()):
                rows += [_row(cells) for cells in entry["rows"]]
                seconds += float(entry["seconds"])
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # an entry of another version
    return rows, seconds


def _agenda(
    splits: Sequence[Split],
    targets: Mapping[CoRunner, int],
    rows: Sequence[CoRunRow],
    bench: _Bench,
    effort: CoRunEffort,
) -> Iterator[tuple[Launches, str]]:
    """The co-runs to measure, in order, with the reason of each. The caller appends results to `rows`."""
    done = {tuple(sorted((row.target, *row.others))) for row in rows}
    spent = 0.0
    for launches in _beside_antagonists(splits, targets):
        cost = bench.seconds(launches)
        if launches not in done and spent + cost <= ANTAGONIST_SHARE * effort.budget_s:
            spent += cost
            yield launches, "antagonist"
    rng = np.random.default_rng(_SEED)
    every = _candidates(splits, targets, rng)
    open_ = [launches for launches in every if launches not in done]
    if not open_:
        return
    known: list[Question] = [(row.target, row.others) for row in rows]
    costs = [bench.seconds(each) for each in open_]
    sampler = CoRunSampler([sides(each) for each in open_], rng, known=known, cost=costs)
    count = sum(row.chosen != "antagonist" for run in runs_of(rows) for row in run[:1])
    while True:
        count += 1
        is_drawn = count % RANDOM_EVERY == 0
        number = sampler.random(rng) if is_drawn else sampler.next()
        if number is None:
            return
        before = len(rows)
        yield open_[number], "random" if is_drawn else "active"
        if len(rows) > before:
            sampler.take(number)
        else:
            sampler.skip(number)


def _beside_antagonists(splits: Sequence[Split], targets: Mapping[CoRunner, int]) -> list[Launches]:
    """Co-runs of every model alone among antagonists, at its smallest batch, then at its largest one."""
    found: dict[Launches, None] = {}
    for pick in (min, max):
        for split in splits:
            for size in sorted(set(split)):
                rest = list(split)
                rest.remove(size)
                others = [(ANTAGONIST, each, each) for each in rest]
                by_model: dict[str, list[CoRunner]] = {}
                for key in targets:
                    if key[2] == size:
                        by_model.setdefault(key[0], []).append(key)
                for keys in by_model.values():
                    found[tuple(sorted((pick(keys), *others)))] = None
    return list(found)


def _candidates(splits: Sequence[Split], targets: Mapping[CoRunner, int], rng: np.random.Generator) -> list[Launches]:
    """Candidate co-runs in the partitions of the splits: all combinations, or a random sample if there are too many."""
    of_size: dict[int, list[CoRunner]] = {}
    for key in targets:
        of_size.setdefault(key[2], []).append(key)
    found: dict[Launches, None] = {}
    share = MOST_CANDIDATES // len(splits)
    for split in splits:
        counts = {size: split.count(size) for size in sorted(split)}
        if prod(len(of_size.get(size, ())) ** count for size, count in counts.items()) <= share:
            ways = product(
                *(combinations_with_replacement(of_size.get(size, ()), count) for size, count in counts.items())
            )
            found |= {tuple(sorted(key for part in way for key in part)): None for way in ways}
            continue
        for _ in range(share):
            drawn = [of_size[size][int(rng.integers(len(of_size[size])))] for size in split]
            found[tuple(sorted(drawn))] = None
    return list(found)


class _Bench:
    """Runs concurrent launches in processes, each on its own cores."""

    def __init__(
        self, root: Path, cores: tuple[int, ...], effort: CoRunEffort, latency_ns: Mapping[CoRunner, int]
    ) -> None:
        self._root, self._cores, self._effort = root, cores, effort
        self._latency_ns = latency_ns
        self._sides: dict[tuple[int, ...], Side] = {}

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; the next measurement starts new ones."""
        for side in self._sides.values():
            side.close()
        self._sides = {}

    def seconds(self, launches: Launches) -> float:
        """Expected seconds of `measure`, without loading models."""
        windows = sum(self._window_ns([each]) for each in launches) + self._window_ns(launches)
        return self._effort.rounds * windows / 1e9

    def measure(self, launches: Launches, chosen: str) -> list[CoRunRow]:
        """A row for each launch as target. Raises CotenantError when one of them cannot run."""
        try:
            return self._measure(launches, chosen)
        except CotenantError:
            self.close()  # their state is unknown
            raise

    def _measure(self, launches: Launches, chosen: str) -> list[CoRunRow]:
        launches = tuple(sorted(launches, key=lambda each: -each[2]))  # so that names do not move partitions
        parts = _cut(self._cores, tuple(size for _, _, size in launches))
        those = [self._side(part.cores) for part in parts]
        for side, launch in zip(those, launches, strict=True):
            side.prepare(launch)
        alone: list[list[int]] = [[] for _ in launches]
        beside: list[list[int]] = [[] for _ in launches]
        for number in range(self._effort.rounds + _EXTRA_ROUNDS):
            if number >= self._effort.rounds and all(beside):
                break
            # Against drift: each side runs alone just before or after all run concurrently, in alternating order.
            order = list(range(len(launches)))
            order = order if number % 2 == 0 else order[::-1]
            half = (len(order) + 1) // 2
            for at in order[:half]:
                alone[at] += self._alone(those[at], launches[at])
            loops = loop_together(those, self._window_ns(launches))
            for at, loop in enumerate(loops):
                beside[at] += within(loop, [*loops[:at], *loops[at + 1 :]])
            for at in order[half:]:
                alone[at] += self._alone(those[at], launches[at])
        if not all(beside):
            raise CotenantError(f"{_text(launches)}: no launch ran wholly beside the others")
        questions = sides(launches)
        return [
            CoRunRow(target, others, _timed(alone[at]), _timed(beside[at]), chosen)
            for at, (target, others) in enumerate(questions)
        ]

    def _alone(self, side: Side, launch: CoRunner) -> list[int]:
        return within(loop_together([side], self._window_ns([launch]))[0], [])

    def _side(self, cores: tuple[int, ...]) -> Side:
        if cores not in self._sides:
            self._sides[cores] = Side(self._root, cores, self._effort.array_bytes)
        return self._sides[cores]

    def _window_ns(self, launches: Sequence[CoRunner]) -> int:
        longest = max(self._latency_ns.get(each, 0) for each in launches)
        slower = _SLOWER if len(launches) > 1 else 1.0
        runs = self._effort.runs / self._effort.rounds + 2  # the first and the last run do not count
        return round(max(self._effort.window_s * 1e9, runs * longest * slower))


def _timed(samples: Sequence[int]) -> Timed:
    return Timed(quantile_ns(samples, 50), quantile_ns(samples, 95), len(samples))


def _row(cells: Mapping[str, Any]) -> CoRunRow:
    """A row from its entry in the journal."""
    model, batch, size = cells["target"]
    others = tuple((str(name), int(items), int(cores)) for name, items, cores in cells["others"])
    alone, beside = Timed(**cells["alone"]), Timed(**cells["beside"])
    return CoRunRow((str(model), int(batch), int(size)), others, alone, beside, str(cells["chosen"]))


def _text(launches: Launches) -> str:
    return " | ".join(f"{model} x{batch}" for model, batch, _ in launches)
