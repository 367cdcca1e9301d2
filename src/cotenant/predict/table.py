"""Latencies of launches from measured tables: models by `predict.latency`, segments by the weights of units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Self

from cotenant.core.predictor import Group, Spans
from cotenant.errors import CotenantError
from cotenant.predict.latency import PARTS, LatencyModel
from cotenant.predict.margin import NO_MARGIN, SafetyMargin
from cotenant.predict.scales import Scales, scale_of
from cotenant.profiles.latency_table import LatencyTable
from cotenant.profiles.version_table import VersionTable
from cotenant.work import CPU, Work

_MOST_SPANS = 256
_MEMORY = 1 << 17
"""Memorised results at most; some 30 MB."""


class TablePredictor:
    """Predicts from one latency table for each tenant. Pure; results are memorised.

    - Whole models: by the LatencyModel of the table; `models` may have models made of the same tables before.
    - Groups: the slowest member. Launches on disjoint cores are assumed not to interfere.
    - Models with several versions of units: by the version table, at pressure 0.
    - `scales` multiplies latencies of tenants or shapes, by online calibration; `margin` makes upper estimates.
    """

    def __init__(
        self,
        tables: Mapping[str, LatencyTable],
        scales: Scales | None = None,
        models: Mapping[str, LatencyModel] | None = None,
    ) -> None:
        self.tables = dict(tables)
        made = models or {}
        self.models = {
            name: made[name] if name in made and made[name].table is table else LatencyModel(table)
            for name, table in self.tables.items()
        }
        self.scales = dict(scales or {})
        self.margin = NO_MARGIN
        self.beside = 0.0
        """Measured memory pressure of other processes, from 0 to 1."""
        known = [table.versions for table in self.tables.values()]
        self.bandwidth_bytes_per_s = max(
            [each.bandwidth_bytes_per_s for each in known if isinstance(each, VersionTable)], default=0
        )
        """Memory bandwidth of the machine on which versions were measured; 0 if unknown."""
        self._known: dict[tuple[Work, int], int] = {}
        self._singles: dict[int, dict[str, int]] = {}
        self._merged: dict[tuple[str, int, int, int, int], tuple[int, ...]] = {}
        self._spans: dict[tuple[str, int, int], Spans] = {}

    def latency_ns(self, work: Work, size: int, device: str = CPU) -> int:
        """Predicted latency in ns of work alone; any device. Raises CotenantError for a tenant without a table."""
        latency = self._known.get((work, size))
        return self._fill(work, size) if latency is None else latency

    def upper_ns(self, tenant: str, latency_ns: int, slo_ns: int) -> int:
        """Upper estimate in ns of the time until the response is sent, by `margin`."""
        return self.margin.upper_ns(tenant, latency_ns, slo_ns)

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        """Time in ns of each group: that of its slowest member. Raises CotenantError for a tenant without a table."""
        latency_ns = self.latency_ns
        return [max([latency_ns(*member) for member in group]) for group in groups]

    def unmeasured(self, most: int) -> frozenset[int]:
        """Empty: no number of members is known better than another one."""
        return frozenset()

    def longest_ns(self, groups: Sequence[Group]) -> Sequence[int]:
        """Upper bounds in ns of the groups' times: here `group_ns`."""
        return self.group_ns(groups)

    def singles_ns(self, cores: int) -> Mapping[str, int]:
        """Latency in ns of every tenant's whole model, by name, for one row of the first declared shape."""
        made = self._singles.get(cores)
        if made is None:
            made = {name: self.latency_ns(self._whole(name, 0, 1), cores) for name in self.tables}
            self._singles[cores] = made
        return made

    def merged_ns(self, tenant: str, shape: int, items: int, most: int, cores: int) -> tuple[int, ...]:
        """Latencies in ns of 1, 2, ... merged queries. Raises CotenantError for a tenant without a table."""
        made = self._merged.get((tenant, shape, items, most, cores))
        return self._merge(tenant, shape, items, most, cores) if made is None else made

    def spans(self, tenant: str, shape: int, items: int) -> Spans:
        """Prefix sums of a tenant's units, by its version table.

        Unmeasured rows and shapes scale with the latency of the whole model on one core. A table without versions gives
        one version and one level of pressure: each unit has its weight's part of the whole latency.

        Raises CotenantError for a tenant without a table.
        """
        made = self._spans.get((tenant, shape, items))
        if made is None:
            if len(self._spans) >= _MOST_SPANS:
                self._spans.clear()
            made = self._spans[tenant, shape, items] = self._table_spans(tenant, shape, items)
        return made

    def _table_spans(self, tenant: str, shape: int, items: int) -> Spans:
        table = self._table(tenant)
        if isinstance(table.versions, VersionTable):
            made = table.versions.spans()
            model = self.models[tenant]
            rows = model.latency_ns(shape, items, 1) / model.latency_ns(0, 1, 1)
            factor = rows * scale_of(self.scales, tenant, shape)
            if factor == rows == 1.0:
                return made
            moved = tuple([round(moved * rows) for moved in made.moved])
            return made._replace(ns=tuple([round(ns * factor) for ns in made.ns]), moved=moved)
        work = self._whole(tenant, shape, items)
        prefix = self.models[tenant].prefix
        ratio = table.segment_ratio if len(prefix) > 2 else 1.0
        cores = max([row.cores for row in table.rows])
        ns: list[int] = []
        least = 0
        for count in range(1, cores + 1):
            whole = self.latency_ns(work, count)
            least = whole if count == 1 else min(least, whole)
            ns += [int(least * ratio * each) // PARTS for each in prefix]
        return Spans(len(prefix) - 1, 1, 1, cores, ns, [0] * len(ns))

    def unit_count(self, tenant: str) -> int:
        """Number of units of a tenant's model."""
        return len(self.models[tenant].prefix) - 1

    def scaled(self, scales: Scales) -> TablePredictor:
        """The same tables with other factors."""
        return TablePredictor(self.tables, scales, self.models).with_margin(self.margin).with_beside(self.beside)

    def with_margin(self, margin: SafetyMargin) -> Self:
        """The same predictor, including its memory, with another margin."""
        made = copy(self)
        made.margin = margin
        return made

    def with_beside(self, beside: float) -> Self:
        """The same predictor, including its memory, with another pressure of other processes."""
        made = copy(self)
        made.beside = beside
        return made

    def _whole(self, tenant: str, shape: int, items: int) -> Work:
        return Work(tenant, shape, items, 0, len(self._table(tenant).unit_weights))

    def _fill(self, work: Work, size: int) -> int:
        tenant, shape, items, start, end = work.tenant, work.shape, work.items, work.start, work.end
        table, model = self._table(tenant), self.models[tenant]
        prefix = model.prefix
        last = len(prefix) - 1
        end = end or last
        if isinstance(table.versions, VersionTable):
            spans = self.spans(tenant, shape, items)
            version = min(work.version, spans.versions - 1)
            latency = spans.block_ns(start, end, version, 0, min(size, spans.cores)) or 1
        elif start == 0 and end == last:
            latency = round(model.latency_ns(shape, items, size) * scale_of(self.scales, tenant, shape)) or 1
        else:
            whole = self.latency_ns(Work(tenant, shape, items, 0, last), size)
            latency = int(whole * table.segment_ratio * (prefix[end] - prefix[start])) // PARTS or 1
        if len(self._known) >= _MEMORY:
            self._known.clear()
        self._known[work, size] = latency
        return latency

    def _table(self, tenant: str) -> LatencyTable:
        table = self.tables.get(tenant)
        if table is None:
            raise CotenantError(f"there is no profile of {tenant!r}: profile it first")
        return table

    def _merge(self, tenant: str, shape: int, items: int, most: int, cores: int) -> tuple[int, ...]:
        made = [self.latency_ns(self._whole(tenant, shape, items), cores)]
        for count in range(2, most + 1):
            together = self.latency_ns(self._whole(tenant, shape, count * items), cores)
            if together > made[-1] + made[0]:
                break
            made.append(max(together, made[-1]))
        if len(self._merged) >= _MEMORY:
            self._merged.clear()
        self._merged[tenant, shape, items, most, cores] = tuple(made)
        return tuple(made)
