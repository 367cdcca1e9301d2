"""The overlap-aware predictor: how long launches take that start together (Abacus, SC'21, section 5).

Fitted by `cotenant.predict.overlap_fit`; here is what serving needs. The vector of each member is computed once and
looked up by the member afterwards, so that a group costs a sum, a maximum and two small products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain

import numpy as np
import numpy.typing as npt

from cotenant.errors import InvalidValueError
from cotenant.predict.conformal import Margins
from cotenant.predict.overlap_features import Features, TenantFacts
from cotenant.predict.overlap_net import NORMS, UNKNOWN, Monotone, Net, Weights, member_vectors
from cotenant.predict.protocol import Group, Member
from cotenant.predict.table import TablePredictor

_MEMORY = 1 << 15
"""Members whose vectors are kept at most; some 15 MB."""
_MEDIAN = 0.5
_FURTHEST = 3.0
"""Logarithm of how far a median may be above what the members take in turn, or below what the longest takes alone. A
fit to few groups can go astray by many orders for a member that is much shorter than the others."""


@dataclass(frozen=True, slots=True)
class OverlapModel:
    """Everything that was fitted. `tenants` are those in the samples, whose weights are rows 1, 2, ... in this order.

    `fingerprint` names the device, `digests` the models of the tenants, as the profile does.
    """

    weights: Weights
    monotone: Monotone
    scale_ns: float
    tenants: tuple[str, ...]
    facts: tuple[TenantFacts, ...]
    margins: Margins
    fingerprint: str = ""
    created: str = ""
    command: str = ""
    digests: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """Digest of all that predictions depend on."""
        content = sha256(repr((self.monotone, self.scale_ns, self.tenants, self.facts, self.margins)).encode())
        for name, weights in sorted(self.weights.items()):
            content.update(name.encode() + np.ascontiguousarray(weights).tobytes())
        return content.hexdigest()[:16]


class OverlapPredictor:
    """Predicts groups at `quantile`, times `factor`. See GroupPredictor; pure but for what it remembers of members.

    The quantile covers single runs of groups like the measured ones: the fitted median plus the split conformal margin
    of held-out groups. Tenants that were in no sample are predicted from their profile, by weights fitted for members
    whose tenant was hidden. Raises InvalidValueError for a quantile outside [0.5, 1) or a factor that is not positive.
    """

    def __init__(self, model: OverlapModel, quantile: float = _MEDIAN, factor: float = 1.0) -> None:
        if not _MEDIAN <= quantile < 1:
            raise InvalidValueError("overlap predictor", "quantile", quantile, "at least 0.5 and below 1")
        if not 0 < factor < float("inf"):
            raise InvalidValueError("overlap predictor", "factor", factor, "a positive number")
        self.model = model
        self.quantile = quantile
        self.factor = factor
        self._shares = model.margins.shares(quantile)
        self._share_of = np.array([self._shares[0], *self._shares])
        self._floor_ns = model.margins.floor_ns
        self._features = Features(model.facts, model.scale_ns)
        self._solo = TablePredictor({each.name: each.table for each in model.facts})
        self._number = {name: number for number, name in enumerate(model.tenants, 1)}
        self._used = {name: value.astype(np.float64) for name, value in _effective(model).items()}
        self._width = width = self._used["b3"].size
        # Pairs to be sorted lie in two halves here, not beside each other: that is quicker.
        halves = np.r_[0:width:2, 1:width:2]
        for name, axis in (("w3", 1), ("b3", 0), ("w4", 0), ("w4", 1), ("b4", 0), ("w5", 0)):
            self._used[name] = np.ascontiguousarray(self._used[name].take(halves, axis))
        into = np.column_stack([self._used["w3"], self._used["skip"]])
        # The trunk takes sum, maximum and sum less maximum. The part of the sum is multiplied once a member.
        self._from_sum = into[:width] + into[2 * width :]
        self._from_largest = into[width : 2 * width] - into[2 * width :]
        self._powers = np.array(NORMS)
        self._rows: dict[Member, int] = {}
        # A row a member: vector, upper quantile alone, vector times weights, powers of the solo time. Row 0 is nobody.
        self._table = np.zeros((1024, 2 * width + 2 + len(NORMS)))
        self._solo_known: dict[tuple[str, int, int, int, int, int], int] = {}

    @property
    def key(self) -> str:
        """Tells one fit from another, whatever quantile and factor."""
        return self.model.key

    def latency_ns(self, tenant: str, shape: int, items: int, start: int, end: int, cores: int) -> int:
        """See Predictor: the profile's latency with the margin of groups of one."""
        key = tenant, shape, items, start, end, cores
        found = self._solo_known.get(key)
        if found is None:
            plain = self._solo.latency_ns(*key)
            found = self._solo_known[key] = max(1, round(self._raised(plain, self._shares[0])))
            if len(self._solo_known) > _MEMORY:
                self._solo_known.clear()
        return found

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        """See GroupPredictor. Raises CotenantError for a tenant without facts, InvalidValueError for an empty group."""
        if not groups:
            return []
        try:
            rows = list(map(self._rows.__getitem__, chain.from_iterable(groups)))
        except KeyError:
            self._learn(groups)
            rows = list(map(self._rows.__getitem__, chain.from_iterable(groups)))
        sizes = list(map(len, groups))
        most, least, count = max(sizes), min(sizes), len(sizes)
        if not least:
            raise InvalidValueError("overlap predictor", "group", (), "at least one member")
        share: npt.NDArray[np.float64] | float
        if least == most:
            found = self._table.take(rows, 0).reshape(count, most, -1)
            share = self._share_of[min(most, len(self._shares))]
        else:
            lengths = np.array(sizes)
            padded = np.zeros((count, most), np.intp)
            padded[np.arange(most) < lengths[:, None]] = rows
            found = self._table[padded]
            share = self._share_of[np.minimum(lengths, len(self._shares))]
        width = self._width
        total, largest = found[:, 0, width + 1 :], found[:, 0, : width + 1]
        for slot in range(1, most):  # quicker than sums and maxima along an axis
            total = total + found[:, slot, width + 1 :]
            largest = np.maximum(largest, found[:, slot, : width + 1])
        norms = np.log(total[:, width + 1 :]) / self._powers
        plain = self._plain(total[:, : width + 1], largest[:, :width], norms)
        raised = np.maximum(plain + share * (plain + self._floor_ns), largest[:, width]) * self.factor
        answer: list[int] = np.maximum(np.rint(raised), 1).astype(np.int64).tolist()
        return answer

    def with_margin(self, factor: float) -> OverlapPredictor:
        """The same predictor with all predictions times `factor`, for example that of AdaptiveConformal."""
        return OverlapPredictor(self.model, self.quantile, factor)

    def at(self, quantile: float) -> OverlapPredictor:
        """The same predictor at another quantile of single runs."""
        return OverlapPredictor(self.model, quantile, self.factor)

    def with_unseen(self, facts: Sequence[TenantFacts]) -> OverlapPredictor:
        """The same predictor for these tenants, too, as ones that were in no sample: new ones, or changed models."""
        names = {each.name for each in facts}
        kept = tuple(each for each in self.model.facts if each.name not in names)
        tenants = tuple("" if name in names else name for name in self.model.tenants)
        return OverlapPredictor(replace(self.model, facts=(*kept, *facts), tenants=tenants), self.quantile, self.factor)

    def is_seen(self, tenant: str) -> bool:
        """Whether a tenant was in the samples."""
        return tenant in self._number

    def unit_count(self, tenant: str) -> int:
        """Number of units of a tenant's model."""
        return self._features.unit_count(tenant)

    def _raised(self, plain: float, share: float) -> float:
        return (plain + share * (plain + self._floor_ns)) * self.factor

    def _plain(
        self, summed: npt.NDArray[np.float64], largest: npt.NDArray[np.float64], norms: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Medians in ns from what the members add up to, their largest vectors and the norms of their solo times."""
        used = self._used
        both = summed + largest @ self._from_largest
        first = _sorted_halves(both[:, :-1] + used["b3"])
        second = _sorted_halves(first @ used["w4"] + used["b4"])
        output = second @ used["w5"] + both[:, -1] + norms @ used["norms"] + used["b5"][0]
        # Both bounds grow with every unit, row and member, as the output does.
        bounded = np.clip(output, norms[:, -1] - _FURTHEST, norms[:, 0] + _FURTHEST)
        medians: npt.NDArray[np.float64] = np.exp(bounded) * self.model.scale_ns
        return medians

    def _learn(self, groups: Sequence[Group]) -> None:
        """Compute the vectors of members that are not known yet."""
        new = [member for member in dict.fromkeys(chain.from_iterable(groups)) if member not in self._rows]
        if len(self._rows) + len(new) > _MEMORY:
            self._rows.clear()
            new = list(dict.fromkeys(chain.from_iterable(groups)))
        features, solo = zip(*map(self._features.row, new), strict=True)
        begin = len(self._rows) + 1
        needed = begin + len(new)
        if needed > len(self._table):
            grown = np.zeros((max(needed, 2 * len(self._table)), self._table.shape[1]))
            grown[:begin] = self._table[:begin]
            self._table = grown
        x = np.array(features)
        for at, member in enumerate(new):
            number = self._number.get(member.tenant, UNKNOWN)
            # One row at a time: products of other shapes may round otherwise, and equal members need equal vectors.
            self._table[begin + at] = self._row_of(number, x[at : at + 1], np.array([solo[at]]))
        for at, member in enumerate(new, begin):
            self._rows[member] = at

    def _row_of(
        self, number: int, x: npt.NDArray[np.float64], solo: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        vector = member_vectors(self._used, number, x).astype(np.float64)
        summed = vector @ self._from_sum
        powers = solo[:, None] ** self._powers
        alone = 0.0
        if self.quantile > _MEDIAN and self.model.monotone is not Monotone.NOTHING:
            # A group is not faster than any of its members alone, also where groups of one need the wider margin.
            plain = float(self._plain(summed, vector, np.log(powers) / self._powers)[0])
            alone = plain + self._shares[0] * (plain + self._floor_ns)
        return np.concatenate([vector[0], [alone], summed[0], powers[0]])


def _sorted_halves(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    half = values.shape[1] // 2
    made = np.empty_like(values)
    np.maximum(values[:, :half], values[:, half:], out=made[:, :half])
    np.minimum(values[:, :half], values[:, half:], out=made[:, half:])
    return made


def _effective(model: OverlapModel) -> Weights:
    return Net(model.weights, model.monotone).effective()
