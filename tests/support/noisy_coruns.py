"""A made-up world of pairs that run together, measured with noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cotenant.techniques.partitions.coruns import CoRun, CoRunner

MODELS = ("a", "b", "c")
BATCHES = (1, 2, 4, 8, 16, 32)
SIZES = (30, 70)
NOISE = 0.01


def true_factor(target: CoRunner, others: Sequence[CoRunner]) -> float:
    """A known interference function: base and sensitivity by model, batch and size, times the sum of pressures."""
    model, batch, size = target
    number = MODELS.index(model)
    base = 1.02 + 0.25 * (number + 1) / batch**0.5
    sensitivity = (0.6 + 0.3 * number) * (1.3 - size / 150)
    pressure = sum((0.03 + 0.05 * MODELS.index(name)) * rows**0.3 * (part / 50) ** 0.3 for name, rows, part in others)
    return base + sensitivity * pressure


def world() -> list[list[CoRun]]:
    rng = np.random.default_rng(7)
    keys = [
        ((a, i, size), (b, j, 100 - size))
        for size in SIZES
        for a in MODELS
        for i in BATCHES
        for b in MODELS
        for j in BATCHES
    ]
    noise = np.exp(NOISE * rng.standard_normal(len(keys))).tolist()
    return [
        [CoRun(target, (other,), true_factor(target, [other]) * each)]
        for (target, other), each in zip(keys, noise, strict=True)
    ]
