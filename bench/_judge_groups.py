"""How wrong the overlap-aware predictor is on groups that it has not seen, from samples alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cotenant.techniques.overlap.group_samples import GroupSample
from cotenant.techniques.overlap.predict.overlap_errors import FOLDS, QUICK, held_out
from cotenant.techniques.overlap.predict.overlap_features import TenantFacts
from cotenant.techniques.overlap.predict.overlap_fit import FEWEST_SAMPLES, FitSettings, fit_overlap

LEVELS = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Judged:
    """One sample and its prediction by a fit without this sample. `upper_ns` is the 99 % quantile."""

    sample: GroupSample
    predicted_ns: int
    upper_ns: int

    @property
    def name(self) -> str:
        """The tenants together."""
        return " + ".join(sorted(member.work.tenant for member in self.sample.members))

    @property
    def error(self) -> float:
        """Relative error against the median of the runs."""
        return abs(self.predicted_ns / self.sample.median_ns - 1.0)


@dataclass(frozen=True, slots=True)
class Judgement:
    """`judged`: cross-validated. `unseen`: MAPE by tenant when all its groups are left out of the fit, in per cent.
    `coverage`: share of single runs below each quantile, by level. `scatter`: MAPE of the runs themselves around their
    median, below which no predictor can be expected to get against single runs."""

    judged: tuple[Judged, ...]
    unseen: tuple[tuple[str, float], ...]
    coverage: tuple[tuple[float, float], ...]
    scatter: float

    @property
    def mape(self) -> float:
        """Mean absolute percentage error of all groups."""
        return float(100 * np.mean([each.error for each in self.judged]))

    def by_name(self) -> list[tuple[str, int, float]]:
        """(tenants, groups, MAPE), by name."""
        errors: dict[str, list[float]] = {}
        for each in self.judged:
            errors.setdefault(each.name, []).append(each.error)
        return [(name, len(found), float(100 * np.mean(found))) for name, found in sorted(errors.items())]

    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {
            "groups": len(self.judged),
            "mape_pct": self.mape,
            "scatter_pct": self.scatter,
            "unseen_mape_pct": dict(self.unseen),
            "coverage": {str(level): share for level, share in self.coverage},
        }


def cross_validate(
    samples: Sequence[GroupSample],
    facts: Sequence[TenantFacts],
    *,
    seed: int = 0,
    settings: FitSettings = QUICK,
    on_step: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Judgement:
    """Judge the predictor: five folds of all samples, then every tenant left out in turn.

    Raises InvalidValueError for too few samples.
    """
    tenants = sorted({member.work.tenant for sample in samples for member in sample.members})
    total = FOLDS + len(tenants)
    judged: list[Judged] = []
    covered: dict[float, list[bool]] = {level: [] for level in LEVELS}

    def on_fold(done: int, _: int, text: str) -> None:
        on_step(done, total, text)

    for tests, fitted in held_out(samples, facts, seed=seed, settings=settings, on_step=on_fold):
        groups = [sample.members for sample in tests]
        by_level = {level: fitted.at(level).group_ns(groups) for level in LEVELS}
        judged += map(Judged, tests, by_level[0.5], by_level[0.99])
        for level, bounds in by_level.items():
            covered[level] += [run <= b for b, sample in zip(bounds, tests, strict=True) for run in sample.runs_ns]
    unseen = []
    for number, tenant in enumerate(tenants):
        on_step(FOLDS + number, total, f"without {tenant}")
        inside = [sample for sample in samples if any(m.work.tenant == tenant for m in sample.members)]
        kept = [sample for sample in samples if all(m.work.tenant != tenant for m in sample.members)]
        if inside and len(kept) >= FEWEST_SAMPLES:
            found = fit_overlap(kept, facts, seed=seed, settings=settings).group_ns([each.members for each in inside])
            errors = [abs(p / each.median_ns - 1.0) for p, each in zip(found, inside, strict=True)]
            unseen.append((tenant, float(100 * np.mean(errors))))
    on_step(total, total, "")
    scatter = np.mean([abs(run / sample.median_ns - 1.0) for sample in samples for run in sample.runs_ns])
    coverage = tuple((level, float(np.mean(hits))) for level, hits in covered.items())
    return Judgement(tuple(judged), tuple(unseen), coverage, float(100 * scatter))
