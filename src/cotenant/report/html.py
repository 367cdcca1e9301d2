"""A report of one or several runs as one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from cotenant.errors import InvalidValueError
from cotenant.metrics import TenantSummary
from cotenant.report import charts
from cotenant.report.charts import MARKS, RunResult, tenants_of
from cotenant.report.style import style_sheet
from cotenant.report.svg import SHAPES
from cotenant.report.tables import attainment_style, milliseconds, percent
from cotenant.types import Outcome

__all__ = ["RunResult", "Section", "write_report"]

_COLUMNS = (
    *("tenant", "SLO ms", "offered", "answered", "late", "dropped", "rejected", "failed", "cancelled"),
    *("p50 ms", "p99 ms", "goodput/s", "attainment"),
)
_GRADES = {"green": "good", "yellow": "fair", "red": "bad", "dim": "soft"}


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the caller's own: running text, and below it text shown as it is (code, recognised text)."""

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
    created: datetime | None = None,
) -> None:
    """Write the report of `runs` (of the same tenants, as a rule) to `path`.

    `machine` holds facts such as those of `cotenant.report.machine.machine_facts`; `profiles` are rows of a table, all
    with the same keys; `traces` maps run names to Perfetto files; `created` is the time shown, now by default.

    Raises InvalidValueError when there is no run, or two of one name.
    """
    names = [run.name for run in runs]
    if not runs or len(set(names)) != len(names):
        raise InvalidValueError("report", "runs", names, "at least one run, with distinct names")
    moment = (created or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M %Z")
    body = [
        f'<h1>{escape(title)}</h1><p class="soft">cotenant report, {escape(moment)}</p>',
        _headline(runs),
        *(f'<p class="warn">{escape(run.name)}: {escape(text)}</p>' for run in runs for text in run.warnings),
        _attainment(runs),
        _tables(runs),
        _distributions(runs),
        _over_time(runs),
        _goodput(runs),
        *(_own(section) for section in sections),
        _profiles(profiles),
        _traces(traces or {}),
        _machine(runs, machine or {}),
    ]
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n",
        encoding="utf-8",
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{''.join(parts)}</section>"


def _headline(runs: Sequence[RunResult]) -> str:
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
        low = ""
        if lowest and len(run.summary.tenants) > 1:
            low = f"average of the tenants {percent(run.summary.mean_attainment)}, "
            low += f"lowest {escape(lowest.tenant)} {percent(lowest.attainment)}"
        cards.append(
            f'<div class="card b{series}"><span class="run">{escape(run.name)}</span><b>{percent(total.attainment)}</b>'
            f"<span>of {total.offered} queries answered within their SLO</span><span>{low}</span>"
            f"<span>goodput {total.goodput_per_s:.1f} of {total.offered_per_s:.1f} queries/s offered</span></div>"
        )
    return f'<p class="lead">{sentence}.</p><div class="cards">{"".join(cards)}</div>'


def _runs_key(runs: Sequence[RunResult], extra: str = "") -> str:
    entries = "".join(
        f'<span><svg viewBox="0 0 22 14"><rect class="c{series}" y="2" width="22" height="10" rx="2"/></svg>'
        f"{escape(run.name)}</span>"
        for series, run in enumerate(runs)
    )
    return f'<div class="key">{entries}{extra}</div>'


def _attainment(runs: Sequence[RunResult]) -> str:
    return _section(
        "Attainment",
        "<p>Share of the offered queries that were answered within their SLO. Late, dropped, rejected and failed "
        "queries all count as missed.</p>",
        _runs_key(runs),
        f'<div class="wide">{charts.attainment_bars(runs)}</div>',
    )


def _tables(runs: Sequence[RunResult]) -> str:
    parts = []
    for run in runs:
        about = "; ".join(f"{escape(key)} {escape(value)}" for key, value in run.description.items())
        rows = [_row(line) for line in run.summary.tenants]
        if len(rows) > 1:
            rows.append(_row(run.summary.total, "total"))
        parts.append(
            f'<h3>{escape(run.name)}</h3><p class="soft">{about}</p><div class="wide"><table><tr>'
            + _heads(_COLUMNS)
            + f"</tr>{''.join(rows)}</table></div>"
        )
    note = '<p class="soft">Percentiles are over answered and late queries, from the time a query was due.</p>'
    return _section("Figures per tenant", *parts, note)


def _row(line: TenantSummary, css: str = "") -> str:
    counts = (line.late, line.dropped, line.rejected, line.failed, line.cancelled)
    cells = [
        f"<td>{escape(line.tenant)}</td><td>{milliseconds(line.slo_ms)}</td><td>{line.offered}</td><td>{line.answered}</td>",
        *(f'<td class="{"" if count else "zero"}">{count}</td>' for count in counts),
        f"<td>{milliseconds(line.p50_ms)}</td><td>{milliseconds(line.p99_ms)}</td><td>{line.goodput_per_s:.1f}</td>",
        f'<td class="{_GRADES[attainment_style(line.attainment)]}">{percent(line.attainment)}</td>',
    ]
    return f'<tr class="{css}">{"".join(cells)}</tr>'


def _distributions(runs: Sequence[RunResult]) -> str:
    figures = "".join(charts.latency_distribution(runs, tenant) for tenant in tenants_of(runs))
    return _section(
        "How long answers took",
        "<p>Share of all offered queries that had their answer within the time on the (logarithmic) axis. Where a "
        "curve crosses the dashed line is the attainment; where it ends below 100 %, the rest never got an answer.</p>",
        _runs_key(runs),
        f'<div class="grid2">{figures}</div>',
    )


def _over_time(runs: Sequence[RunResult]) -> str:
    figures, stride = [], 1
    for tenant in tenants_of(runs):
        latencies_ms = charts.latency_range_ms(runs, tenant)
        for run in runs:
            figure, shown = charts.latency_over_time(run, tenant, latencies_ms)
            figures.append(figure)
            stride = max(stride, shown)
    happened = [outcome for outcome in MARKS if any(getattr(run.summary.total, outcome.value) for run in runs)]
    key = "".join(_mark_key(outcome) for outcome in happened)
    thinned = f" Busy charts show one query in up to {stride}." if stride > 1 else ""
    return _section(
        "Latency over time",
        "<p>Every query, at the time when it was due, and how long it took until it ended, in whatever way; queries "
        f"refused at once lie on the lower edge.{thinned}</p>",
        f'<div class="key">{key}</div><div class="grid2">{"".join(figures)}</div>',
    )


def _mark_key(outcome: Outcome) -> str:
    shape, css = MARKS[outcome]
    return (
        f'<span><svg viewBox="0 0 22 14"><path class="mark {shape} {css}" d="M11 7{SHAPES[shape]}"/></svg>'
        f"{outcome.value}</span>"
    )


def _goodput(runs: Sequence[RunResult]) -> str:
    tenants = tenants_of(runs)
    parts = [f'<div class="wide">{charts.goodput_over_time(runs, None)}</div>']
    if len(tenants) > 1:
        figures = "".join(charts.goodput_over_time(runs, tenant) for tenant in tenants)
        parts.append(f'<div class="grid2">{figures}</div>')
    offered = '<span><svg viewBox="0 0 22 14"><path class="line offered" d="M0 7H22"/></svg>offered</span>'
    return _section(
        "Goodput over time",
        "<p>Queries answered within their SLO, per second, by the time when they were due.</p>",
        _runs_key(runs, offered),
        *parts,
    )


def _own(section: Section) -> str:
    text = "".join(f"<p>{escape(part)}</p>" for part in section.text.split("\n\n") if part.strip())
    verbatim = f"<pre><code>{escape(section.verbatim)}</code></pre>" if section.verbatim else ""
    return _section(section.title, text, verbatim)


def _profiles(profiles: Sequence[Mapping[str, object]]) -> str:
    if not profiles:
        return ""
    heads = list(profiles[0])
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(row.get(head, '')))}</td>" for head in heads) + "</tr>" for row in profiles
    )
    return _section(
        "Profiles",
        "<p>What the models were measured to take, alone; the scheduler predicts from these.</p>",
        f'<div class="wide"><table><tr>{_heads(heads)}</tr>{rows}</table></div>',
    )


def _heads(heads: Iterable[str]) -> str:
    return "".join(f"<th>{escape(head)}</th>" for head in heads)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _traces(traces: Mapping[str, str]) -> str:
    if not traces:
        return ""
    rows = "".join(
        f"<tr><td>{escape(run)}</td><td><code>{escape(file)}</code></td></tr>" for run, file in traces.items()
    )
    return _section(
        "Look at every decision",
        "<p>Each run left a trace: what ran on which cores when, and what became of every query. Open "
        "<code>https://ui.perfetto.dev</code> in a browser, choose “Open trace file” and pick the file (it is "
        "read in the browser, not uploaded). Keys W, A, S and D zoom and move.</p>",
        f'<table class="facts">{rows}</table>',
    )


def _machine(runs: Sequence[RunResult], machine: Mapping[str, str]) -> str:
    facts = {**machine}
    for run in runs:
        facts[f"run {run.name}"] = "; ".join(f"{key} {value}" for key, value in run.description.items()) or "–"
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in facts.items())
    return _section("Machine and versions", f'<table class="facts">{rows}</table>')
