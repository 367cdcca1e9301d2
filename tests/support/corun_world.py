"""A made-up world of co-runs: sensitivity times pressure, and measurements of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from cotenant.techniques.partitions.coruns import CoRun, CoRunner
from cotenant.techniques.partitions.predict.factors import Interference, PressureInterference
from cotenant.techniques.partitions.predict.interference_fit import fit_pressure

MODELS = ("a", "b", "c", "d")
BATCHES = (1, 4, 16)
SIZES = (20, 50, 80)
STREAM = "antagonist"


def true_pressure(key: CoRunner) -> float:
    model, batch, size = key
    if model == STREAM:
        return 0.2 * batch
    return MODELS.index(model) * 0.04 * batch**0.3 * (size / 50) ** 0.2


def true_answer(key: CoRunner) -> tuple[float, float]:
    model, batch, size = key
    if model == STREAM:
        return 1.1, 1.5
    return 1.02 + 0.1 / batch, (0.6 + 0.3 * MODELS.index(model)) * (1.2 - size / 200)


def world(target: CoRunner, others: Sequence[CoRunner]) -> float:
    base, sensitivity = true_answer(target)
    return base + sensitivity * sum(map(true_pressure, others))


def pairs(models: Sequence[str] = MODELS) -> list[tuple[CoRunner, CoRunner]]:
    return [
        ((a, i, size), (b, j, 100 - size))
        for size in SIZES
        for a in models
        for i in BATCHES
        for b in models
        for j in BATCHES
    ]


def measure(
    seed: int, *, noise: float = 0.01, slow: str = "", models: Sequence[str] = MODELS, share: float = 1.0
) -> list[CoRun]:
    """Pairs of the world; the model `slow` runs twice as long every fourth time."""
    chance = np.random.default_rng(seed)
    found = []
    for target, other in pairs(models):
        factor = world(target, [other]) * float(np.exp(chance.normal(0.0, noise)))
        if target[0] == slow and chance.random() < 0.25:
            factor *= 2.0
        if chance.random() < share:
            found.append(CoRun(target, (other,), factor))
    return found


@cache
def fitted() -> PressureInterference:
    return fit_pressure(measure(1, share=0.6))


def median_error(model: Interference, coruns: Sequence[CoRun]) -> float:
    return float(np.median([abs(model.factor(*c.target, c.others) / c.factor - 1) for c in coruns]))
