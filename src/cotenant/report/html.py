"""Report of one or several runs as a self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from cotenant.errors import InvalidValueError
from cotenant.metrics import TenantSummary
from cotenant.report import bound_text, charts
from cotenant.report.charts import MARKS, RunResult, tenants_of
from cotenant.report.lost_text import html_rows
from cotenant.report.page import Cell, Page, bar_key, facts, grid, key, paragraph, short_text, table
from cotenant.report.svg import SHAPES
from cotenant.report.tables import attainment_style, milliseconds, percent
from cotenant.trace.bound import RunBound
from cotenant.trace.lost import LossAccount
from cotenant.types import Outcome

__all__ = ["RunResult", "Section", "write_report"]

_COLUMNS = (
    *("tenant", "SLO ms", "offered", "answered", "late", "dropped", "rejected", "failed", "cancelled", "excluded"),
    *("p50 ms", "p99 ms", "goodput/s", "attainment"),
)
_GRADES = {"green": "good", "yellow": "fair", "red": "bad", "dim": "soft"}


@dataclass(frozen=True, slots=True)
class Section:
    """An additional section: running text, and below it verbatim text (code, recognised text)."""

    title: str
    text: str = ""
    verbatim: str = ""


def write_report(
    path: Path,
    runs: Sequence[RunResult],
    *,
    title: str = "Several tenants on one machine",
    machine: Mapping[str, str] | None = None,
    profiles: Sequence[Mapping[str, object]] = (),
    sections: Sequence[Section] = (),
    traces: Mapping[str, str] | None = None,
    bounds: Mapping[str, RunBound] | None = None,
    losses: Mapping[str, LossAccount] | None = None,
    created: datetime | None = None,
) -> None:
    """Write the report of `runs`, usually of the same tenants, to `path`.

    `machine` holds facts such as those of `cotenant.report.machine.machine_facts`. `profiles` are rows of a table, with
    equal keys. By name of the run: `traces` are Perfetto files, `bounds` upper bounds, `losses` accounts of lost
    queries. `created` is the time shown, now by default.

    Raises InvalidValueError without a run, or for two runs with the same name.
    """
    names = [run.name for run in runs]
    if not runs or len(set(names)) != len(names):
        raise InvalidValueError("report", "runs", names, "at least one run, with distinct names")
    moment = (created or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M %Z")
    page = Page(title)
    page.add(paragraph(f"cotenant report, {moment}", "soft"), _headline(runs, bounds or {}))
    page.add(*(paragraph(f"{run.name}: {text}", "warn") for run in runs for text in run.warnings))
    _attainment(page, runs)
    _tables(page, runs)
    _lost(page, losses or {})
    _bounds(page, bounds or {})
    _distributions(page, runs)
    _over_time(page, runs)
    _goodput(page, runs)
    for section in sections:
        _own(page, section)
    _profiles(page, profiles)
    _traces(page, traces or {})
    _machine(page, runs, machine or {})
    page.write(path)


def _headline(runs: Sequence[RunResult], bounds: Mapping[str, RunBound]) -> str:
    shares = [run.summary.total.attainment or 0.0 for run in runs]
    best, worst = max(range(len(runs)), key=shares.__getitem__), min(range(len(runs)), key=shares.__getitem__)
    if not any(run.summary.total.offered for run in runs):
        return '<p class="lead">No query was offered.</p>'
    sentence = f"<b>{escape(runs[best].name)}</b> answered {percent(shares[best])} of all queries within their SLO"
    if shares[best] > shares[worst]:
        sentence += f", <b>{escape(runs[worst].name)}</b> {percent(shares[worst])}"
    cards = []
    for series, run in enumerate(runs):
        total = run.summary.total
        lowest = min(
            (line for line in run.summary.tenants if line.attainment is not None),
            key=lambda line: line.attainment or 0.0,
            default=None,
        )
        lines = [f"of {total.offered} queries answered within their SLO"]
        if lowest and len(run.summary.tenants) > 1:
            mean, least = percent(run.summary.mean_attainment), percent(lowest.attainment)
            lines.append(f"average of the tenants {mean}, lowest {lowest.tenant} {least}")
        lines.append(f"goodput {total.goodput_per_s:.1f} of {total.offered_per_s:.1f} queries/s offered")
        if found := bounds.get(run.name):
            part = bound_text.of_bound(found.in_time, found.most)
            lines.append(f"{part} of the upper bound of any schedule")
        cards.append(
            f'<div class="card b{series}"><span class="run">{escape(run.name)}</span><b>{percent(total.attainment)}</b>'
            + "".join(f"<span>{escape(line)}</span>" for line in lines)
            + "</div>"
        )
    return f'<p class="lead">{sentence}.</p><div class="cards">{"".join(cards)}</div>'


def _attainment(page: Page, runs: Sequence[RunResult]) -> None:
    page.section(
        "Attainment",
        "<p>Share of the offered queries that were answered within their SLO. Late, dropped, rejected and failed "
        "queries all count as missed. Excluded are queries with a client time-out below the SLO, and those that their "
        "client cancelled within the SLO.</p>",
        bar_key(run.name for run in runs),
        f'<div class="wide">{charts.attainment_bars(runs)}</div>',
    )


def _tables(page: Page, runs: Sequence[RunResult]) -> None:
    parts = []
    for run in runs:
        about = "; ".join(f"{name} {value}" for name, value in run.description.items())
        several = len(run.summary.tenants) > 1
        rows = [_row(line) for line in (*run.summary.tenants, *([run.summary.total] if several else []))]
        parts += [f"<h3>{escape(run.name)}</h3>", paragraph(about, "soft")]
        parts.append(table(_COLUMNS, rows, last="total" if several else ""))
    note = paragraph("Percentiles are over answered and late queries, from the time a query was due.", "soft")
    page.section("Figures per tenant", *parts, note)


def _row(line: TenantSummary) -> list[Cell]:
    counts = (line.late, line.dropped, line.rejected, line.failed, line.cancelled, line.excluded)
    return [
        *(line.tenant, milliseconds(line.slo_ms), str(line.offered), str(line.answered)),
        *((str(count), "" if count else "zero") for count in counts),
        *(milliseconds(line.p50_ms), milliseconds(line.p99_ms), f"{line.goodput_per_s:.1f}"),
        (percent(line.attainment), _GRADES[attainment_style(line.attainment)]),
    ]


def _lost(page: Page, losses: Mapping[str, LossAccount]) -> None:
    parts = []
    for name, heads, cells, culprits in html_rows(losses):
        last = "total" if len(cells) > 1 else ""
        parts += [f"<h3>{escape(name)}</h3>", table(heads, cells, last=last), paragraph(culprits, "soft")]
    if parts:
        about = "Queries that were not answered in time, by cause (docs/metrics.md)."
        page.section("Lost queries and their causes", paragraph(about), *parts)


def _bounds(page: Page, bounds: Mapping[str, RunBound]) -> None:
    if bounds:
        parts = [
            f"<h3>{escape(name)}</h3>{''.join(map(paragraph, bound_text.sentences(found)))}"
            + table(bound_text.COLUMNS, bound_text.rows(found))
            for name, found in bounds.items()
        ]
        page.section(
            "Distance from the upper bound",
            "<p>Upper bounds of any schedule, even with all arrivals known: queries are preemptible, may be answered "
            "in part and may spread over all slots. Each needs the least time by its profile, times the measured pace "
            "of the tenant's launches. Times are those at the server.</p>",
            *parts,
        )


def _distributions(page: Page, runs: Sequence[RunResult]) -> None:
    page.section(
        "Distribution of latencies",
        "<p>Share of all offered queries that were answered within the time on the (logarithmic) axis. A curve crosses "
        "the dashed line at the attainment; queries above its end were never answered.</p>",
        bar_key(run.name for run in runs),
        grid(charts.latency_distribution(runs, tenant) for tenant in tenants_of(runs)),
    )


def _over_time(page: Page, runs: Sequence[RunResult]) -> None:
    figures, stride = [], 1
    for tenant in tenants_of(runs):
        latencies_ms = charts.latency_range_ms(runs, tenant)
        for run in runs:
            figure, shown = charts.latency_over_time(run, tenant, latencies_ms)
            figures.append(figure)
            stride = max(stride, shown)
    happened = [outcome for outcome in MARKS if any(getattr(run.summary.total, outcome.value) for run in runs)]
    thinned = f" Busy charts show one query in up to {stride}." if stride > 1 else ""
    page.section(
        "Latency over time",
        "<p>Each query at the time when it was due, with the time until its outcome. Queries refused at arrival are on "
        f"the lower edge.{thinned}</p>",
        key((_mark(outcome), outcome.value) for outcome in happened),
        grid(figures),
    )


def _mark(outcome: Outcome) -> str:
    shape, css = MARKS[outcome]
    return f'<path class="mark {shape} {css}" d="M11 7{SHAPES[shape]}"/>'


def _goodput(page: Page, runs: Sequence[RunResult]) -> None:
    tenants = tenants_of(runs)
    parts = [f'<div class="wide">{charts.goodput_over_time(runs, None)}</div>']
    if len(tenants) > 1:
        parts.append(grid(charts.goodput_over_time(runs, tenant) for tenant in tenants))
    page.section(
        "Goodput over time",
        "<p>Queries answered within their SLO, per second, by the time when they were due.</p>",
        bar_key((run.name for run in runs), ('<path class="line offered" d="M0 7H22"/>', "offered")),
        *parts,
    )


def _own(page: Page, section: Section) -> None:
    text = "".join(paragraph(part) for part in section.text.split("\n\n") if part.strip())
    page.section(section.title, text, f"<pre><code>{escape(section.verbatim)}</code></pre>" if section.verbatim else "")


def _profiles(page: Page, profiles: Sequence[Mapping[str, object]]) -> None:
    if profiles:
        heads = list(profiles[0])
        page.section(
            "Profiles",
            "<p>Measured latencies of the models alone, from which the scheduler predicts.</p>",
            table(heads, ([short_text(row.get(head, "")) for head in heads] for row in profiles)),
        )


def _traces(page: Page, traces: Mapping[str, str]) -> None:
    if traces:
        page.section(
            "Timelines",
            "<p>Each run has a timeline with its launches by core and the outcome of each query. Open "
            "<code>https://ui.perfetto.dev</code> in a browser, choose “Open trace file” and pick the file. The "
            "browser reads it and uploads nothing. Keys W, A, S and D zoom and move.</p>",
            facts(traces.items()),
        )


def _machine(page: Page, runs: Sequence[RunResult], machine: Mapping[str, str]) -> None:
    about = {f"run {run.name}": "; ".join(f"{name} {value}" for name, value in run.description.items()) for run in runs}
    page.section("Machine and versions", facts((name, value or "–") for name, value in {**machine, **about}.items()))
