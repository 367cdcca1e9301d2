"""The linear interference model of GPU-let (ATC 2022), section 4.4: a line in the utilisation of L2 and DRAM.

    `factor = max(1, c1*L2 + c2*sum(L2 of others) + c3*DRAM + c4*sum(DRAM of others) + c5)`

Utilisation is a share (0 to 1) of the whole device, of each batch alone in its partition. The paper has one co-runner;
the sums over several are ours. It has no tail either: quantiles come from the errors of the fit, where there was one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.coruns import CoRun, CoRunner
from cotenant.techniques.partitions.predict.factors import Known, Scores, Surface

WHOLE = 0
"""Size under which `Utilisation.of` takes figures of the undivided device."""


@dataclass(frozen=True, slots=True)
class LinearConstants:
    """c1 to c5, in the order of the paper."""

    l2_self: float
    l2_other: float
    dram_self: float
    dram_other: float
    constant: float


@dataclass(frozen=True, slots=True)
class Utilisation:
    """L2 and DRAM utilisation as shares of 1, by (model, batch, size).

    With `is_of_whole` the table was taken on the undivided device. Then a partition counts as using as much of it as
    its size in per cent says, as in the authors' planner.
    """

    table: Surface
    is_of_whole: bool = False

    @classmethod
    def of(cls, shares: Mapping[CoRunner, tuple[float, float]]) -> Utilisation:
        """From (L2, DRAM) by (model, batch, size); all sizes are `WHOLE` where they are of the undivided device.

        Raises InvalidValueError for an empty table, a share below 0, and where only some sizes are `WHOLE`.
        """
        for key, pair in shares.items():
            if min(pair) < 0:
                raise InvalidValueError(f"utilisation of {key}", "L2 and DRAM", pair, "shares from 0")
        whole = sum(size == WHOLE for _, _, size in shares)
        if whole not in (0, len(shares)):
            raise InvalidValueError("utilisation", "sizes", whole, "all of partitions or all of the whole device")
        return cls(Surface(shares), bool(whole))

    def at(self, model: str, batch: int, size: int) -> tuple[float, float]:
        """(L2, DRAM), interpolated between batches and sizes. Raises InvalidValueError for an unknown model."""
        (l2, dram), known = self.table.at((model, batch, WHOLE if self.is_of_whole else size))
        if known is Known.FOREIGN:
            raise InvalidValueError("utilisation", "model", model, f"one of {', '.join(self.table.models)}")
        share = size / 100 if self.is_of_whole else 1.0
        return l2 * share, dram * share


@dataclass(frozen=True, slots=True)
class LinearInterference:
    """The line, with the utilisation that it needs. `scores` are relative errors of co-runs that a fit had not seen."""

    constants: LinearConstants
    utilisation: Utilisation
    scores: Scores | None = None

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        """See `Interference`. Raises InvalidValueError for a model without known utilisation."""
        if not others:
            return 1.0
        c = self.constants
        l2, dram = self.utilisation.at(model, batch, size)
        added = sum(self.adds(model, batch, size, other) for other in others)
        return max(1.0, c.l2_self * l2 + c.dram_self * dram + added + c.constant)

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        """See `Interference`; below 0 where a constant is. Raises InvalidValueError as `factor` does."""
        l2, dram = self.utilisation.at(*other)
        return self.constants.l2_other * l2 + self.constants.dram_other * dram

    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        """See `Interference`; one relative margin for all. Raises InvalidValueError where there was no fit."""
        if self.scores is None:
            raise InvalidValueError("linear interference", "scores", None, "a fit to measurements: these are constants")
        margin = self.scores.margin(quantile)
        return self.factor(model, batch, size, others) * (1.0 + margin) if others else 1.0


def fit_linear(
    coruns: Sequence[CoRun], utilisation: Utilisation, *, seed: int = 0, folds: int = 10
) -> LinearInterference:
    """Least squares, with the errors of held-out folds for quantiles. All chance comes from `seed`.

    Raises InvalidValueError for fewer than ten co-runs, and for a model without known utilisation.
    """
    if len(coruns) < 10:
        raise InvalidValueError("linear interference", "co-runs", len(coruns), "at least ten")
    x = np.array([(*_terms(utilisation, each.target, each.others), 1.0) for each in coruns])[:, [0, 2, 1, 3, 4]]
    y = np.array([each.factor for each in coruns])
    fold = np.random.default_rng(seed).permutation(len(coruns)) % folds
    scores = np.empty(len(coruns))
    for number in range(folds):
        held = fold == number
        found = np.linalg.lstsq(x[~held], y[~held])[0]
        scores[held] = y[held] / np.maximum(1.0, x[held] @ found) - 1.0
    constants = LinearConstants(*np.linalg.lstsq(x, y)[0].tolist())
    return LinearInterference(constants, utilisation, Scores(tuple(np.sort(scores).tolist())))


def _terms(utilisation: Utilisation, target: CoRunner, others: Sequence[CoRunner]) -> tuple[float, float, float, float]:
    """L2 and DRAM of the target, then the sums of the others."""
    shares = [utilisation.at(*other) for other in others]
    return (*utilisation.at(*target), sum(l2 for l2, _ in shares), sum(dram for _, dram in shares))
