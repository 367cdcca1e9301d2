"""Charts of a report, drawn from the queries of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cotenant.metrics import Columns, OutcomeLog, Summary, summarise
from cotenant.report.svg import Chart, Point, duration, grouped_bars, round_up
from cotenant.report.tables import percent
from cotenant.types import Outcome

if TYPE_CHECKING:
    from cotenant.load.result import LoadResult

HALF, FULL = 560, 1130
"""Widths of charts in pixels: two in a row, and one in a row."""

MARKS: Mapping[Outcome, tuple[str, str]] = {
    Outcome.ANSWERED: ("dot", "answered"),
    Outcome.LATE: ("triangle", "late"),
    Outcome.DROPPED: ("cross", "dropped"),
    Outcome.REJECTED: ("plus", "rejected"),
    Outcome.FAILED: ("square", "failed"),
    Outcome.CANCELLED: ("square", "cancelled"),
}
"""Mark and CSS class by outcome. Shapes differ as well as colours, for colour-blind readers."""

_MOST_POINTS = 1500
_MOST_STEPS = 400


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of a report: its queries, its figures and the description of its setup.

    Only queries due in [start_ns, end_ns) are drawn.
    """

    name: str
    log: OutcomeLog
    summary: Summary
    slo_ns: Mapping[str, int]
    start_ns: int
    end_ns: int
    description: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        log: OutcomeLog,
        *,
        end_ns: int,
        start_ns: int = 0,
        slo_ns: Mapping[str, int],
        description: Mapping[str, str] | None = None,
        warnings: tuple[str, ...] = (),
    ) -> RunResult:
        """Result of a run with this log of outcomes."""
        summary = summarise(log, start_ns=start_ns, end_ns=end_ns, slo_ns=slo_ns, tenants=list(slo_ns))
        return cls(name, log, summary, slo_ns, start_ns, end_ns, description or {}, warnings)

    @classmethod
    def from_load(cls, name: str, result: LoadResult, description: Mapping[str, str] | None = None) -> RunResult:
        """Result of a run of the load generator."""
        start_ns = result.warmup_ns if result.warmup_ns < result.sent_until_ns else 0
        return cls(
            name,
            result.log,
            result.summary,
            result.slo_ns,
            start_ns,
            max(1, result.sent_until_ns),
            description or {},
            result.warnings,
        )

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of its tenants, in order."""
        return tuple(line.tenant for line in self.summary.tenants)

    def columns(self, tenant: str) -> Columns:
        """The drawn queries of a tenant; none for a tenant that is not in this run."""
        log = self.log if tenant in self.log.tenants else OutcomeLog([tenant])
        return log.columns(tenant).window(self.start_ns, self.end_ns)


def tenants_of(runs: Sequence[RunResult]) -> tuple[str, ...]:
    """Tenants of all runs, in the order of the first."""
    return tuple(dict.fromkeys(tenant for run in runs for tenant in run.tenants))


def attainment_bars(runs: Sequence[RunResult]) -> str:
    """Attainment per tenant and of all queries, a bar per run."""
    groups = [
        (tenant, [run.summary.tenant(tenant).attainment if tenant in run.tenants else None for run in runs])
        for tenant in tenants_of(runs)
    ]
    groups.append(("all queries", [run.summary.total.attainment for run in runs]))
    return grouped_bars(FULL, groups, "Attainment per tenant and run", percent)


def latency_distribution(runs: Sequence[RunResult], tenant: str) -> str:
    """Chart of the share of the offered queries answered within x. Dropped and refused queries are never answered."""
    curves = []
    for run in runs:
        columns = run.columns(tenant)
        answered_ms = np.sort(columns.latency_ns[columns.completed]) / 1e6
        curves.append((answered_ms, columns.outcome.size))
    slo_ms = _slo_ms(runs, tenant)
    seen = np.concatenate([np.array([slo_ms] if slo_ms else [1.0]), *(values for values, _ in curves)])
    lo, hi = _log_range(float(seen.min()), float(seen.max()))
    chart = Chart(
        HALF,
        284,
        title=tenant,
        x=(lo, hi),
        y=(0.0, 1.0),
        log_x=True,
        x_label="latency",
        y_label="share of offered queries",
        x_format=duration,
        y_format=lambda share: f"{100 * share:.0f} %",
        headroom=True,
    )
    if slo_ms:
        chart.vertical(slo_ms, f"SLO {duration(slo_ms)}")
    for series, (values, offered) in enumerate(curves):
        if offered and values.size:
            ranks = np.unique(np.linspace(1, values.size, min(values.size, _MOST_STEPS)).astype(int))
            steps = [(float(values[rank - 1]), rank / offered) for rank in ranks]
            chart.stairs([(steps[0][0], 0.0), *steps, (hi, steps[-1][1])], f"s{series}")
    return chart.svg()


def latency_over_time(run: RunResult, tenant: str, latencies_ms: tuple[float, float]) -> tuple[str, int]:
    """Chart with a mark for each query, by due time and latency; and the stride n: one query in n is drawn."""
    columns = run.columns(tenant)
    stride = max(1, math.ceil(columns.outcome.size / _MOST_POINTS))
    slo_ms = run.slo_ns.get(tenant, 0) / 1e6
    chart = Chart(
        HALF,
        250,
        title=f"{tenant}, {run.name}",
        x=(run.start_ns / 1e9, run.end_ns / 1e9),
        y=latencies_ms,
        log_y=True,
        x_label="due at, seconds",
        y_label="latency",
        y_format=duration,
    )
    for outcome, (shape, css) in MARKS.items():
        chosen = np.flatnonzero(columns.of(outcome))[::stride]
        due_s, latency_ms = columns.scheduled_ns[chosen] / 1e9, columns.latency_ns[chosen] / 1e6
        chart.marks(zip(due_s.tolist(), latency_ms.tolist(), strict=True), shape, css)
    if slo_ms:
        chart.horizontal(slo_ms, f"SLO {duration(slo_ms)}")
    return chart.svg(), stride


def latency_range_ms(runs: Sequence[RunResult], tenant: str) -> tuple[float, float]:
    """Common range of latencies of a tenant over all runs, for comparable charts. Refusals may be below it."""
    found = [np.array([_slo_ms(runs, tenant) or 1.0])]
    for run in runs:
        columns = run.columns(tenant)
        found.append(columns.latency_ns[columns.completed] / 1e6)
        found.append(columns.latency_ns[columns.of(Outcome.DROPPED)] / 1e6)
    values = np.concatenate(found)
    values = values[values > 0]
    # A few very early drops must not widen the axis: immediate refusals are drawn on its lower edge.
    return _log_range(float(np.quantile(values, 0.005)), float(values.max()))


def goodput_over_time(runs: Sequence[RunResult], tenant: str | None) -> str:
    """Chart of goodput and offered load in queries per second, by due time. `tenant` None: all tenants."""
    longest_ns = max(run.end_ns - run.start_ns for run in runs)
    bin_s = max(1.0, round_up(longest_ns / 1e9 / 60)) if longest_ns >= 10e9 else round_up(longest_ns / 20e9)
    series: list[tuple[str, list[Point]]] = []
    for number, run in enumerate(runs):
        names = run.tenants if tenant is None else (tenant,)
        parts = [run.columns(name) for name in names]
        due_s = np.concatenate([part.scheduled_ns for part in parts]) / 1e9 - run.start_ns / 1e9
        good = np.concatenate([part.of(Outcome.ANSWERED) for part in parts])
        if number == 0:
            series.append(("offered", _rates(due_s, run, bin_s)))
        series.append((f"s{number}", _rates(due_s[good], run, bin_s)))
    top = round_up(max((y for _, points in series for _, y in points), default=1.0) * 1.02)
    chart = Chart(
        FULL if tenant is None else HALF,
        290 if tenant is None else 240,
        title="all tenants" if tenant is None else tenant,
        x=(0.0, longest_ns / 1e9),
        y=(0.0, top),
        x_label="due at, seconds",
        y_label="queries / s",
    )
    for css, points in series:
        chart.line(points, css)
    return chart.svg()


def _rates(due_s: np.ndarray[tuple[int], np.dtype[np.float64]], run: RunResult, bin_s: float) -> list[Point]:
    span_s = (run.end_ns - run.start_ns) / 1e9
    bins = max(1, math.floor(span_s / bin_s + 1e-9))  # a last bin that is cut short would look like a collapse
    counts, edges = np.histogram(due_s, bins=bins, range=(0.0, bins * bin_s))
    middles = (edges[:-1] + edges[1:]) / 2
    return list(zip(middles.tolist(), (counts / bin_s).tolist(), strict=True))


def _slo_ms(runs: Sequence[RunResult], tenant: str) -> float | None:
    return next((run.slo_ns[tenant] / 1e6 for run in runs if tenant in run.slo_ns), None)


def _log_range(lo: float, hi: float) -> tuple[float, float]:
    lo = max(lo, 1e-3)
    return lo / 1.3, max(hi, lo * 3) * 1.3
