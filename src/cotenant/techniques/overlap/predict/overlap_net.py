"""A network that is monotone by construction: more units, more rows or one more member never lower its output.

1. Each member becomes a vector of non-negative numbers, through non-negative weights for nondecreasing features.
2. Sum, maximum, and sum less maximum over the members pool the vectors.
3. A trunk with non-negative weights maps them to the logarithm of the group's latency.

Activations sort pairs of values (GroupSort). Maximum and minimum give such a network convex and concave segments, which
ReLU alone cannot (Runje and Shankaranarayana, 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from cotenant.techniques.overlap.predict.overlap_features import NONDECREASING, ROW_FEATURES, WIDTH, Floats

Ints = npt.NDArray[np.intp]
Reals = npt.NDArray[np.floating[Any]]
"""float32 in the fit, float64 in serving, where rounding must not break monotonicity."""
Weights = dict[str, Floats]
UNKNOWN = 0
"""Row of the weights for tenants in no sample."""
NORMS = (1.0, 2.0, 4.0)
"""The p of the p-norms over solo times in the output: between their sum and their maximum."""
_TRUNK = ("w3", "w4", "w5", "skip", "norms")


class Monotone(StrEnum):
    """The additions under which predictions never fall."""

    ALL = "all"
    """More units, more rows, another member."""
    UNITS = "units"
    """More units, another member. On some devices a larger batch is faster."""
    NOTHING = "nothing"
    """None: for comparison, and for the least error."""


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """Groups as arrays. `x`: (groups, slots, WIDTH). `tenant`: (groups, slots), -1 for no member. `norms`: (groups,
    len(NORMS))."""

    x: Floats
    tenant: Ints
    norms: Floats

    def take(self, rows: Ints) -> GroupArrays:
        """Some of the groups."""
        return GroupArrays(self.x[rows], self.tenant[rows], self.norms[rows])

    def __len__(self) -> int:
        return len(self.tenant)


class Net:
    """Weights, forward and backward pass. `weights` hold raw values; non-negative weights are their magnitudes."""

    def __init__(self, weights: Weights, monotone: Monotone) -> None:
        self.weights = weights
        self.monotone = monotone

    @classmethod
    def random(cls, tenants: int, width: int, monotone: Monotone, rng: np.random.Generator) -> Net:
        """Weights before training, for UNKNOWN and `tenants` tenants; `width` is even."""

        def normal(*shape: int, by: float) -> Floats:
            drawn: Floats = (rng.standard_normal(shape) * by).astype(np.float32)
            return drawn

        count = tenants + 1
        root = float(np.sqrt(width))
        weights = {
            "w1": normal(count, WIDTH, width, by=WIDTH**-0.5),
            "b1": normal(count, width, by=0.1),
            "w2": normal(count, width, width, by=1 / root),
            "b2": normal(count, width, by=0.1),
            "w3": normal(3 * width, width, by=0.6 / root),
            "b3": normal(width, by=0.1),
            "w4": normal(width, width, by=1 / root),
            "b4": normal(width, by=0.1),
            "w5": normal(width, by=1 / width),
            "skip": normal(3 * width, by=0.1 / width),
            "norms": np.full(len(NORMS), 0.2 / len(NORMS), np.float32),
            "b5": np.zeros(1, np.float32),
        }
        return cls(weights, monotone)

    def effective(self) -> Weights:
        """Weights as the passes use them."""
        if self.monotone is Monotone.NOTHING:
            return dict(self.weights)
        bound = {name: np.abs(self.weights[name]) for name in ("w2", *_TRUNK)}
        free = self.weights["w1"].copy()
        free[:, : self._nondecreasing()] = np.abs(free[:, : self._nondecreasing()])
        return {**self.weights, **bound, "w1": free}

    def _nondecreasing(self) -> int:
        return NONDECREASING + (len(ROW_FEATURES) if self.monotone is Monotone.ALL else 0)

    def forward(self, batch: GroupArrays) -> Floats:
        """Logarithm of the latency over the scale, shape (groups,)."""
        used = self.effective()
        vectors = np.zeros((batch.tenant.size, used["b2"].shape[1]), used["b2"].dtype)
        flat, x = batch.tenant.ravel(), batch.x.reshape(batch.tenant.size, WIDTH)
        for tenant in np.unique(flat[flat >= 0]).tolist():
            rows = np.flatnonzero(flat == tenant)
            vectors[rows] = member_vectors(used, tenant, x[rows])
        pooled = _pool(vectors.reshape(*batch.tenant.shape, -1))
        first = _pair_sorted(pooled @ used["w3"] + used["b3"])
        second = _pair_sorted(first @ used["w4"] + used["b4"])
        output: Floats = second @ used["w5"] + pooled @ used["skip"] + batch.norms @ used["norms"] + used["b5"][0]
        return output

    def gradient(self, batch: GroupArrays, loss: Callable[[Floats], Floats]) -> Weights:
        """Gradient of a loss by the raw weights. `loss` maps outputs to its derivative by them, shape (groups,)."""
        used = self.effective()
        groups, slots = batch.tenant.shape
        flat, x = batch.tenant.ravel(), batch.x.reshape(-1, WIDTH)
        vectors = np.zeros((flat.size, used["b2"].shape[1]), used["b2"].dtype)
        memory = []
        for tenant in np.unique(flat[flat >= 0]).tolist():
            rows = np.flatnonzero(flat == tenant)
            mine = x[rows]
            hidden, swapped = _sort_pairs(mine @ used["w1"][tenant] + used["b1"][tenant])
            vectors[rows], slope = _positive(hidden @ used["w2"][tenant] + used["b2"][tenant])
            memory.append((tenant, rows, mine, hidden, swapped, slope))
        shaped = vectors.reshape(groups, slots, -1)
        pooled = _pool(shaped)
        first, swapped3 = _sort_pairs(pooled @ used["w3"] + used["b3"])
        second, swapped4 = _sort_pairs(first @ used["w4"] + used["b4"])
        output = second @ used["w5"] + pooled @ used["skip"] + batch.norms @ used["norms"] + used["b5"][0]
        error = loss(output)
        found: Weights = {name: np.zeros_like(value) for name, value in self.weights.items()}
        found["b5"][0] = error.sum()
        found["norms"] = batch.norms.T @ error
        found["w5"] = second.T @ error
        found["skip"] = pooled.T @ error
        back = _unsort(np.outer(error, used["w5"]), swapped4)
        found["w4"], found["b4"] = first.T @ back, back.sum(0)
        back = _unsort(back @ used["w4"].T, swapped3)
        found["w3"], found["b3"] = pooled.T @ back, back.sum(0)
        spread = _unpool(back @ used["w3"].T + np.outer(error, used["skip"]), shaped).reshape(flat.size, -1)
        for tenant, rows, mine, hidden, swapped, slope in memory:
            back = spread[rows] * slope
            found["w2"][tenant], found["b2"][tenant] = hidden.T @ back, back.sum(0)
            back = _unsort(back @ used["w2"][tenant].T, swapped)
            found["w1"][tenant], found["b1"][tenant] = mine.T @ back, back.sum(0)
        if self.monotone is not Monotone.NOTHING:
            for name in ("w2", *_TRUNK):
                found[name] *= np.sign(self.weights[name])
            nondecreasing = self._nondecreasing()
            found["w1"][:, :nondecreasing] *= np.sign(self.weights["w1"][:, :nondecreasing])
        return found


def member_vectors(used: Mapping[str, Reals], tenant: int, x: Reals) -> Reals:
    """Vectors of members of one tenant, shape (members, width), from effective weights and features."""
    hidden = _pair_sorted(x @ used["w1"][tenant] + used["b1"][tenant])
    return _activated(hidden @ used["w2"][tenant] + used["b2"][tenant])


def place_thresholds(net: Net, batch: GroupArrays, rng: np.random.Generator) -> None:
    """Initialise all layers from data: inputs of unit deviation, thresholds at random samples."""
    raw = net.weights
    flat, x = batch.tenant.ravel(), batch.x.reshape(-1, WIDTH)
    vectors = np.zeros((flat.size, raw["b2"].shape[1]), np.float32)

    def place(values: Floats) -> tuple[Floats, Floats]:
        deviation = values.std(0) + 1e-3
        picked = values[rng.integers(0, len(values), values.shape[1]), np.arange(values.shape[1])]
        return deviation, -picked / deviation

    def settle(weight: Any, bias: Any, inputs: Floats, use: Callable[[], Floats]) -> Floats:
        deviation, thresholds = place(inputs @ use())
        weight /= deviation
        bias[...] = thresholds
        outputs: Floats = inputs @ use() + thresholds
        return outputs

    for tenant in range(raw["b1"].shape[0]):
        rows = np.flatnonzero(flat == tenant) if tenant != UNKNOWN else np.flatnonzero(flat >= 0)
        if not len(rows):
            continue
        one = settle(raw["w1"][tenant], raw["b1"][tenant], x[rows], lambda t=tenant: net.effective()["w1"][t])  # type: ignore[misc]
        two = settle(
            raw["w2"][tenant],
            raw["b2"][tenant],
            _pair_sorted(one),
            lambda t=tenant: net.effective()["w2"][t],  # type: ignore[misc]
        )
        if tenant != UNKNOWN:
            vectors[rows] = _activated(two)
    pooled = _pool(vectors.reshape(*batch.tenant.shape, -1))
    three = settle(raw["w3"], raw["b3"], pooled, lambda: net.effective()["w3"])
    settle(raw["w4"], raw["b4"], _pair_sorted(three), lambda: net.effective()["w4"])


def _pool(vectors: Floats) -> Floats:
    """(groups, slots, width) to (groups, 3 width); absent members are zeros, the least value of a vector."""
    total, largest = vectors.sum(1), vectors.max(1)
    return np.concatenate([total, largest, total - largest], axis=1)


def _unpool(back: Floats, vectors: Floats) -> Floats:
    groups, slots, width = vectors.shape
    spread = np.repeat((back[:, :width] + back[:, 2 * width :])[:, None, :], slots, axis=1)
    at = vectors.argmax(1)[:, None, :]
    extra = (back[:, width : 2 * width] - back[:, 2 * width :])[:, None, :]
    np.put_along_axis(spread, at, np.take_along_axis(spread, at, 1) + extra, 1)
    return spread.reshape(groups, slots, width)


def _sort_pairs(values: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    pairs = values.reshape(len(values), -1, 2)
    swapped = pairs[:, :, 0] < pairs[:, :, 1]
    return _pair_sorted(values), swapped


def _pair_sorted(values: Floats) -> Floats:
    made = np.empty_like(values)
    np.maximum(values[:, ::2], values[:, 1::2], out=made[:, ::2])
    np.minimum(values[:, ::2], values[:, 1::2], out=made[:, 1::2])
    return made


def _unsort(back: Floats, swapped: npt.NDArray[np.bool_]) -> Floats:
    pairs = back.reshape(len(back), -1, 2)
    made = np.empty_like(pairs)
    made[:, :, 0] = np.where(swapped, pairs[:, :, 1], pairs[:, :, 0])
    made[:, :, 1] = np.where(swapped, pairs[:, :, 0], pairs[:, :, 1])
    return made.reshape(back.shape)


def _activated(values: Floats) -> Floats:
    """Half of the values through ReLU, half through the logistic function."""
    half = values.shape[1] // 2
    made = np.empty_like(values)
    np.maximum(values[:, :half], 0.0, out=made[:, :half])
    made[:, half:] = 1.0 / (1.0 + np.exp(-np.minimum(np.maximum(values[:, half:], -30.0), 30.0)))
    return made


def _positive(values: Floats) -> tuple[Floats, Floats]:
    """Activated values, and their derivatives."""
    half = values.shape[1] // 2
    made, slope = _activated(values), np.empty_like(values)
    slope[:, :half] = values[:, :half] > 0
    logistic = made[:, half:]
    slope[:, half:] = logistic * (1.0 - logistic)
    return made, slope
