"""Error of the overlap-aware predictor on unseen groups, by cross-validation on samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.errors import InvalidValueError
from cotenant.techniques.overlap.group_samples import GroupSample
from cotenant.techniques.overlap.predict.overlap import OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import TenantFacts
from cotenant.techniques.overlap.predict.overlap_fit import FEWEST_SAMPLES, FitSettings, fit_overlap

FOLDS = 5
QUICK = FitSettings(steps=3000, hidden_steps=1000)
LEVEL = 0.99

OnStep = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class HeldOutErrors:
    """Mean absolute percentage errors (MAPE) of medians: of all groups, and by set of tenants as (groups, MAPE).

    `coverage_pct` is the share of single runs below the quantile `level`.
    """

    groups: int
    mape_pct: float
    by_tenants: dict[str, tuple[int, float]]
    level: float
    coverage_pct: float


def held_out(
    samples: Sequence[GroupSample],
    facts: Sequence[TenantFacts],
    *,
    seed: int = 0,
    settings: FitSettings = QUICK,
    on_step: OnStep = lambda done, total, text: None,
) -> Iterator[tuple[list[GroupSample], OverlapPredictor]]:
    """Five folds of the samples, each with a fit to the other folds. Raises InvalidValueError for too few samples."""
    if len(samples) < 2 * FEWEST_SAMPLES:
        raise InvalidValueError("predictor report", "samples", len(samples), f"at least {2 * FEWEST_SAMPLES}")
    fold = np.random.default_rng(seed).permutation(len(samples)) % FOLDS
    for number in range(FOLDS):
        on_step(number, FOLDS, f"fold {number + 1} of {FOLDS}")
        kept = [sample for sample, mine in zip(samples, fold, strict=True) if mine != number]
        tests = [sample for sample, mine in zip(samples, fold, strict=True) if mine == number]
        yield tests, fit_overlap(kept, facts, seed=seed, settings=settings)
    on_step(FOLDS, FOLDS, "")


def held_out_errors(
    samples: Sequence[GroupSample],
    facts: Sequence[TenantFacts],
    *,
    settings: FitSettings = QUICK,
    on_step: OnStep = lambda done, total, text: None,
) -> HeldOutErrors:
    """The errors over all folds. Raises InvalidValueError for too few samples."""
    errors: dict[str, list[float]] = {}
    below: list[bool] = []
    for tests, fitted in held_out(samples, facts, settings=settings, on_step=on_step):
        groups = [sample.members for sample in tests]
        found = zip(tests, fitted.at(0.5).group_ns(groups), fitted.at(LEVEL).group_ns(groups), strict=True)
        for sample, median_ns, bound_ns in found:
            name = " + ".join(sorted(member.work.tenant for member in sample.members))
            errors.setdefault(name, []).append(100 * abs(median_ns / sample.median_ns - 1.0))
            below += [run <= bound_ns for run in sample.runs_ns]
    every = [error for each in errors.values() for error in each]
    by_tenants = {name: (len(each), float(np.mean(each))) for name, each in sorted(errors.items())}
    return HeldOutErrors(len(every), float(np.mean(every)), by_tenants, LEVEL, float(100 * np.mean(below)))
