"""The overlap-aware predictor: the latency of launches that start together (Abacus, SC'21, section 5).

`overlap_fit` fits it; this module serves it. The vector of each member is cached, so that a group costs a sum, a
maximum and two small matrix products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, combinations
from math import exp

import numpy as np
import numpy.typing as npt

from cotenant.core.predictor import Group, Member
from cotenant.errors import InvalidValueError
from cotenant.predict.conformal import Margins
from cotenant.predict.table import TablePredictor
from cotenant.techniques.overlap.predict.measured import MeasuredGroups, MemberKey
from cotenant.techniques.overlap.predict.overlap_features import MemberFeatures, TenantFacts
from cotenant.techniques.overlap.predict.overlap_net import NORMS, UNKNOWN, Monotone, Net, Weights, member_vectors
from cotenant.work import CPU, Work

Real = npt.NDArray[np.float64]
_MEMORY = 1 << 15
"""Member vectors in the cache at most; about 15 MB."""
_MANY = 16
"""Number of groups from which the last layers run for all of them at once."""
_MEDIAN = 0.5
_FURTHEST = 3.0
"""Largest logarithm of a median over the sum of solo times, and of the longest solo time over a median. A fit to few
groups can be wrong by orders of magnitude for very short members."""
_LONGEST = 8
"""Members of a group of which subgroups are formed, those with the longest solo times; they have 254 subgroups."""


@dataclass(frozen=True, slots=True)
class OverlapModel:
    """All fitted values. `tenants` are those in the samples; their weights are rows 1, 2, ... in this order.

    `measured` are all groups of the samples, also those of the margins. `fingerprint` is the device, `digests` are the
    models of the tenants, as in the profile.
    """

    weights: Weights
    monotone: Monotone
    scale_ns: float
    tenants: tuple[str, ...]
    facts: tuple[TenantFacts, ...]
    margins: Margins
    measured: MeasuredGroups
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
        content.update(self.measured.lengths.tobytes() + self.measured.members.tobytes())
        return content.hexdigest()[:16]


class OverlapPredictor:
    """Predicts latencies of groups at `quantile`, times `factor`. Implements GroupPredictor; pure apart from its cache.

    The quantile covers single runs of groups like the measured ones. It is the fitted median plus a split conformal
    margin (Vovk et al.) from held-out groups, with the share s of `Margins.shares`:

        quantile(group) = median(group) * (1 + s) + s * floor_ns

    Unseen tenants are predicted from their profile, with weights fitted to members with a hidden tenant. An unmeasured
    number of members is predicted within `bounds_ns`.

    Raises InvalidValueError for a quantile outside [0.5, 1) or a factor that is not positive.
    """

    def __init__(self, model: OverlapModel, quantile: float = _MEDIAN, factor: float = 1.0) -> None:
        if not _MEDIAN <= quantile < 1:
            raise InvalidValueError("overlap predictor", "quantile", quantile, "at least 0.5 and below 1")
        if not 0 < factor < float("inf"):
            raise InvalidValueError("overlap predictor", "factor", factor, "a positive number")
        self.model = model
        self.quantile = quantile
        self.factor = factor
        floor_ns = model.margins.floor_ns
        shares = model.margins.shares(quantile)
        self._raised_by = tuple((1.0 + share, share * floor_ns) for share in (shares[0], *shares))
        """Factor and summand of a median at the quantile, by number of members from 0."""
        self._raised_table = np.array(self._raised_by).T
        self._features = MemberFeatures(model.facts, model.scale_ns)
        self._solo = TablePredictor({each.name: each.table for each in model.facts})
        self._number = {name: number for number, name in enumerate(model.tenants, 1)}
        self.sizes = model.measured.sizes
        """Numbers of members with measured groups, as in FittedGroups."""
        self._no_gap = next(size for size in range(1, len(self.sizes) + 2) if size not in self.sizes) - 1
        """Largest n such that each number of members from 1 to n was measured."""
        self._used = {name: value.astype(np.float64) for name, value in _effective(model).items()}
        self._width = self._used["b3"].size
        self._from_sum, self._from_largest, self._w4, self._w5 = _folded(self._used)
        self._from_logs = tuple((self._used["norms"] / np.array(NORMS)).tolist())
        self._rows: dict[Member, int] = {}
        # A row a member: vector, one, upper quantile alone, vector times weights, powers of the solo time. Row 0 is
        # empty.
        self._table = np.zeros((1024, 2 * self._width + 4 + len(NORMS)))
        self._solo_known: dict[tuple[Work, int], int] = {}

    @property
    def key(self) -> str:
        """Identity of the fit, whatever quantile and factor."""
        return self.model.key

    def latency_ns(self, work: Work, size: int, device: str = CPU) -> int:
        """The profile's latency with the margin of groups of one."""
        found = self._solo_known.get((work, size))
        if found is None:
            plain = self._solo.latency_ns(work, size)
            found = self._solo_known[work, size] = max(1, round(self._raised(plain, 1) * self.factor))
            if len(self._solo_known) > _MEMORY:
                self._solo_known.clear()
        return found

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        """Latencies in ns. Raises CotenantError for a tenant without facts, InvalidValueError for an empty group."""
        if not groups:
            return []
        sizes = list(map(len, groups))
        most = max(sizes)
        if not min(sizes):
            raise InvalidValueError("overlap predictor", "group", (), "at least one member")
        answers = self._fitted_ns(groups, sizes, most)
        if most > self._no_gap:
            unmeasured = [at for at, size in enumerate(sizes) if size not in self.sizes]
            bounds = self.bounds_ns([groups[at] for at in unmeasured])
            for at, (least, longest) in zip(unmeasured, bounds, strict=True):
                answers[at] = min(max(answers[at], least), longest)
        return answers

    def bounds_ns(self, groups: Sequence[Group]) -> list[tuple[int, int]]:
        """Lower and upper bound on each group's time from smaller measured groups, at the quantile.

            lower = max(slowest subgroup of a measured size, slowest member alone)
            upper = max(lower, sum of members alone)

        A member alone is predicted as a group of one if its tenant was measured so, else from the profile. Raises as
        `group_ns`.
        """
        if not all(groups):
            raise InvalidValueError("overlap predictor", "group", (), "at least one member")
        members = list(dict.fromkeys(chain.from_iterable(groups)))
        alone = {member: self.latency_ns(*member) for member in members}
        if 1 in self.sizes:
            ones = [(member,) for member in members if self.is_seen(member.work.tenant)]
            alone.update({one[0]: ns for one, ns in self._all_fitted_ns(ones).items()})
        parts = [self._parts(group, alone) for group in groups]
        known = self._all_fitted_ns(chain.from_iterable(parts))
        found = []
        for group, its_parts in zip(groups, parts, strict=True):
            in_turn = sum([alone[member] for member in group])
            least = max([*(alone[member] for member in group), *(known[part] for part in its_parts)])
            found.append((least, max(in_turn, least)))
        return found

    def _parts(self, group: Group, alone: Mapping[Member, int]) -> list[Group]:
        """Subgroups of two or more of the longest members, of measured sizes."""
        longest = sorted(group, key=lambda member: -alone[member])[:_LONGEST]
        sizes = [size for size in range(2, len(group)) if size in self.sizes]
        return [part for size in sizes for part in combinations(longest, size)]

    def _all_fitted_ns(self, groups: Iterable[Group]) -> dict[Group, int]:
        distinct = list(dict.fromkeys(groups))
        sizes = list(map(len, distinct))
        return dict(zip(distinct, self._fitted_ns(distinct, sizes, max(sizes)), strict=True)) if distinct else {}

    def _fitted_ns(self, groups: Sequence[Group], sizes: list[int], most: int) -> list[int]:
        """The network's medians, raised to the quantile; `most` is the largest size."""
        count = len(sizes)
        try:
            rows = self._rows_of(groups, most)
        except KeyError:
            self._learn(groups)
            rows = self._rows_of(groups, most)
        found = self._table.take(rows, 0)
        edge = self._width + 2
        largest, total = found[:count, :edge], found[:count, edge:]
        for at in range(count, most * count, count):  # faster than sums and maxima along an axis
            slot = found[at : at + count]
            largest, total = np.maximum(largest, slot[:, :edge]), total + slot[:, edge:]
        if count >= _MANY:
            return self._of_many(sizes, largest, total)
        medians = self._plain(largest[:, :-1], total)
        raised_by, last, factor = self._raised_by, len(self._raised_by) - 1, self.factor
        answers = []
        for size, median, least in zip(sizes, medians, largest[:, -1].tolist(), strict=True):
            times, more = raised_by[size if size < last else last]
            raised = median * times + more
            answers.append(round((raised if raised > least else least) * factor) or 1)
        return answers

    def _of_many(self, sizes: list[int], largest: Real, total: Real) -> list[int]:
        """The last layers for all groups at once."""
        output, logs = self._outputs(largest[:, :-1], total)
        by_sum, by_second, by_fourth = self._from_logs
        log_sum, log_squares, log_fourths = logs.T
        output += log_sum * by_sum + log_squares * by_second + log_fourths * by_fourth
        np.maximum(output, log_fourths / NORMS[-1] - _FURTHEST, out=output)
        np.minimum(output, log_sum + _FURTHEST, out=output)
        times, more = self._raised_table.take(sizes, 1, mode="clip")
        raised = np.exp(output) * self.model.scale_ns * times + more
        np.maximum(raised, largest[:, -1], out=raised)
        answers: list[int] = np.maximum(np.rint(raised * self.factor), 1.0).astype(np.int64).tolist()
        return answers

    def _rows_of(self, groups: Sequence[Group], most: int) -> list[int]:
        """Cache rows of members: the first of every group, then the second ones, and so on; 0 for none."""
        known = self._rows
        rows = [known[group[0]] for group in groups]
        for slot in range(1, most):
            rows += [known[group[slot]] if slot < len(group) else 0 for group in groups]
        return rows

    def with_margin(self, factor: float) -> OverlapPredictor:
        """The same predictor with all predictions times `factor`, for example that of AdaptiveConformal."""
        return OverlapPredictor(self.model, self.quantile, factor)

    def at(self, quantile: float) -> OverlapPredictor:
        """The same predictor at another quantile of single runs."""
        return OverlapPredictor(self.model, quantile, self.factor)

    def with_unseen(self, facts: Sequence[TenantFacts]) -> OverlapPredictor:
        """The same predictor with these tenants as unseen ones: new tenants, or changed models."""
        names = {each.name for each in facts}
        kept = tuple(each for each in self.model.facts if each.name not in names)
        tenants = tuple("" if name in names else name for name in self.model.tenants)
        measured = self.model.measured.without([number for number, name in enumerate(tenants, 1) if not name])
        model = replace(self.model, facts=(*kept, *facts), tenants=tenants, measured=measured)
        return OverlapPredictor(model, self.quantile, self.factor)

    def is_seen(self, tenant: str) -> bool:
        """Whether a tenant was in the samples."""
        return tenant in self._number

    def near(self, group: Group) -> int:
        """Number of measured groups near this one: see MeasuredGroups.near.

        Raises as `group_ns`.
        """
        number, known = self._number, self._rows
        if any(member not in known for member in group):
            self._learn([group])
        solo, at, scale_ns = self._table.item, -len(NORMS), self.model.scale_ns
        keys = [
            MemberKey(number.get(work.tenant, UNKNOWN), size, solo(known[member], at) * scale_ns, work.start, work.end)
            for member in group
            for work, size in (member,)
        ]
        return self.model.measured.near(keys)

    def unit_count(self, tenant: str) -> int:
        """Number of units of a tenant's model."""
        return self._features.unit_count(tenant)

    def _raised(self, plain: float, members: int) -> float:
        times, more = self._raised_by[members]
        return plain * times + more

    def _plain(self, largest: Real, total: Real) -> list[float]:
        """Medians in ns, from pooled vectors (`largest`, with a one) and pooled products and powers (`total`)."""
        # Scalars are faster for the few groups of most calls.
        outputs, logs = self._outputs(largest, total)
        by_sum, by_second, by_fourth = self._from_logs
        scale = self.model.scale_ns
        medians = []
        for output, (log_sum, log_squares, log_fourths) in zip(outputs.tolist(), logs.tolist(), strict=True):
            found = output + (log_sum * by_sum + log_squares * by_second + log_fourths * by_fourth)
            # Both bounds are monotone in units, rows and members, as the output is.
            found = max(found, log_fourths / NORMS[-1] - _FURTHEST)
            medians.append(exp(min(found, log_sum + _FURTHEST)) * scale)
        return medians

    def _outputs(self, largest: Real, total: Real) -> tuple[Real, Real]:
        """Network output for each group, and logarithms of its sums of powers, shape (groups, 3)."""
        # numpy calls dominate the cost: for such small matrices `dot` takes a third of the time of `@`.
        edge, half = self._width + 2, self._width // 2
        first = largest.dot(self._from_largest)
        first += total[:, :edge]
        differences = first[:, -half:]
        np.abs(differences, out=differences)
        second = first.dot(self._w4)
        differences = second[:, -half:]
        np.abs(differences, out=differences)
        return second.dot(self._w5), np.log(total[:, edge:])

    def _learn(self, groups: Sequence[Group]) -> None:
        """Compute and cache the vectors of new members."""
        new = [member for member in dict.fromkeys(chain.from_iterable(groups)) if member not in self._rows]
        if len(self._rows) + len(new) > _MEMORY:
            self._rows.clear()
            new = list(dict.fromkeys(chain.from_iterable(groups)))
        features, solo = zip(*map(self._features.row, new), strict=True)
        begin = len(self._rows) + 1
        needed = begin + len(new)
        if needed > len(self._table):
            larger = np.zeros((max(needed, 2 * len(self._table)), self._table.shape[1]))
            larger[:begin] = self._table[:begin]
            self._table = larger
        x = np.array(features)
        for at, member in enumerate(new):
            number = self._number.get(member.work.tenant, UNKNOWN)
            # One row at a time: products of other shapes may round otherwise, and equal members need equal vectors.
            self._table[begin + at] = self._row_of(number, x[at : at + 1], solo[at])
        for at, member in enumerate(new, begin):
            self._rows[member] = at

    def _row_of(self, number: int, x: Real, solo: float) -> Real:
        width, row = self._width, np.empty(self._table.shape[1])
        edge = width + 2
        vector = member_vectors(self._used, number, x)
        row[:width], row[width], row[width + 1] = vector[0], 1.0, 0.0
        row[edge : edge + edge] = vector.dot(self._from_sum)[0]
        row[edge + edge :] = [solo**power for power in NORMS]
        if self.quantile > _MEDIAN and self.model.monotone is not Monotone.NOTHING:
            # A group is not faster than any of its members alone, even if groups of one have a wider margin.
            row[width + 1] = self._raised(self._plain(row[None, : width + 1], row[None, edge:])[0], 1)
        return row


def _folded(used: Mapping[str, Real]) -> tuple[Real, Real, Real, Real]:
    """Weights of the trunk with the fewest operations: for a member's sum, for the maximum, for layers 4 and 5.

    A layer sorts pairs (a, b): max and min are `(a + b +- |a - b|) / 2`. With weights for sums and differences of pairs
    only one magnitude is left to compute. The trunk takes sum, maximum, and sum less maximum; the product with the sum
    is cached by member. The columns of the first layer: sums of pairs, skip connection, one, differences.
    """
    width, half = used["b3"].size, used["b3"].size // 2
    into, bias = _of_pairs(used["w3"], used["b3"])
    columns = [into[:, :half], used["skip"][:, None], np.zeros((len(into), 1)), into[:, half:]]
    into = np.hstack(columns)
    bias = np.concatenate([bias[:half], [used["b5"][0], 1.0], bias[half:]])
    from_sum = into[:width] + into[2 * width :]
    from_largest = np.vstack([into[width : 2 * width] - into[2 * width :], bias])
    w4, b4 = _of_pairs(_to_pairs(used["w4"]), used["b4"])
    rows = np.vstack([w4[:half], np.zeros(width), b4, w4[half:]])
    skips = np.zeros((width + 2, 1))
    skips[half] = 1.0
    w5 = _to_pairs(used["w5"])
    return (
        from_sum,
        from_largest,
        np.hstack([rows[:, :half], skips, rows[:, half:]]),
        np.concatenate([w5[:half], [1.0], w5[half:]]),
    )


def _of_pairs(weights: Real, biases: Real) -> tuple[Real, Real]:
    """Weights and biases of the sums of adjacent outputs, then of their differences."""
    even, odd, b_even, b_odd = weights[:, ::2], weights[:, 1::2], biases[::2], biases[1::2]
    return np.hstack([even + odd, even - odd]), np.concatenate([b_even + b_odd, b_even - b_odd])


def _to_pairs(weights: Real) -> Real:
    """Weights for sums and magnitudes of differences of pairs, from those for maxima and minima."""
    return np.concatenate([weights[::2] + weights[1::2], weights[::2] - weights[1::2]]) / 2


def _effective(model: OverlapModel) -> Weights:
    return Net(model.weights, model.monotone).effective()
