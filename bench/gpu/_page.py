"""The run as one HTML page of plots and tables that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.gpu import _latency, _serving, _sharing
from bench.gpu._fingerprint import Fingerprint
from bench.gpu._journal import Journal, Row
from bench.gpu._stats import median
from cotenant.report.page import Page, bar_key, facts, grid, paragraph, short_text
from cotenant.report.page import table as html_table
from cotenant.report.svg import Chart, duration, grouped_bars, number, round_up

_SERIES = 6
_WIDTH, _HEIGHT = 560, 340


def page(journal: Journal, device: Fingerprint, summary: Mapping[str, Any]) -> str:
    """All that the journal has so far; steps without points are left out and named at the end."""
    sections: list[tuple[str, str, Callable[[Sequence[Row]], str], str]] = [
        ("Latency by share and batch", _latency.LATENCY, _latencies, "Medians; from the start of a launch to its end."),
        ("Pairs in disjoint shares", _latency.CORUN, _coruns,
         "Median latency beside the other model over that alone in the same share. 1 means no interference."),
        ("Served end to end", _serving.SERVING, _served,
         "Share of the offered queries that were answered within the SLO, over all pairs, by batch and load."),
        ("Ways to share", _sharing.WAYS, _ways,
         "Speedup: the sum over both models of rows a second over those of the model alone on the whole device; 1 is "
         "what taking turns gives. Two launches wait in every lane; percentiles of latencies include the waiting."),
        ("Segments beside the whole model", _latency.SEGMENTS, _segments,
         "Launch by launch through the executor, medians of interleaved runs."),
        ("Run-to-run deviation of groups", _sharing.GROUPS, _groups,
         "Standard deviation over mean of the time from the start of a group to the end of its last member."),
        ("Sharing the device anew", _sharing.RESPLIT, _resplits, "Nothing is restarted and no model moves."),
    ]  # fmt: skip
    made = Page(device.name)
    made.add(paragraph(f"cotenant {summary['cotenant']}, {summary['created']}", "soft"), _figures(summary["figures"]))
    if device.kind == "cpu":
        made.add(paragraph("Taken on the cores of a CPU, to try the harness out: SMs are cores, and no figure says "
                           "anything of a GPU.", "warn"))  # fmt: skip
    missing = []
    for title, step, draw, about in sections:
        rows = journal.rows(step)
        if rows:
            made.section(title, paragraph(about), draw(rows))
        else:
            missing.append(title.lower())
    if missing:
        made.add(paragraph(f"Not measured yet: {', '.join(missing)}.", "warn"))
    made.add(*(paragraph(f"{note['what']}: {note['why']}", "warn") for note in summary["notes"]))
    if journal.failures:
        made.section("Points without figures", table(journal.failures))
    made.section("Device", _facts(device))
    return made.html()


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """Rows as a table; all columns of the first one unless told otherwise."""
    names = list(columns or rows[0])
    heads = [name.replace("_", " ") for name in names]
    return html_table(heads, ([short_text(row.get(name, "")) for name in names] for row in rows))


def _figures(found: Mapping[str, float]) -> str:
    rows = [{"figure": name, "value": value} for name, value in found.items()]
    return table(rows) if rows else ""


def _facts(device: Fingerprint) -> str:
    found = [(name, value) for name, value in device.to_json().items() if name != "clocks"]
    return facts((name, str(value)) for name, value in (*found, *device.clocks.items()) if value != "")


def _latencies(rows: Sequence[Row]) -> str:
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    parts = []
    for at in range(0, len(models), _SERIES):
        some = models[at : at + _SERIES]
        mine = [row for row in rows if row["model"] in some]
        items = max({row["items"] for row in mine}, key=lambda n: (sum(row["items"] == n for row in mine), n))
        size = max(row["asked_sms"] for row in mine)
        charts = [
            _lines(some, [row for row in mine if row["items"] == items], "asked_sms",
                   f"{items} row{'s' if items > 1 else ''}", "SMs or cores"),
            _lines(some, [row for row in mine if row["asked_sms"] == size], "items", f"the whole device ({size})",
                   "rows"),
        ]  # fmt: skip
        parts.append(bar_key(some) + grid(charts))
    return "".join(parts)


def _lines(models: Sequence[str], rows: Sequence[Row], column: str, title: str, label: str) -> str:
    xs, ys = [row[column] for row in rows], [row["p50_ms"] for row in rows]
    chart = Chart(
        _WIDTH, _HEIGHT, title=title, x=_range(xs), y=_range(ys), log_x=True, log_y=True,
        x_label=label, y_label="median latency", y_format=duration,
    )  # fmt: skip
    for at, model in enumerate(models):
        points = sorted((row[column], row["p50_ms"]) for row in rows if row["model"] == model)
        chart.line(points, f"s{at}")
        chart.marks(points, "square", f"s{at}")
    return f"<figure>{chart.svg()}</figure>"


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low / 1.2, high * 1.2)


def _coruns(rows: Sequence[Row]) -> str:
    found = sorted(float(row["slowdown"]) for row in rows)
    top = round_up(max(1.2, found[-1]))
    chart = Chart(
        2 * _WIDTH, _HEIGHT, title=f"{len(found)} models beside another", x=(0.0, 100.0), y=(min(0.9, found[0]), top),
        x_label="percent of the measured cases", y_label="slowdown", headroom=True,
    )  # fmt: skip
    points = [(100 * (at + 0.5) / len(found), value) for at, value in enumerate(found)]
    chart.line(points, "s1")
    chart.marks(points, "square", "s1")
    chart.horizontal(1.0, "alone")
    worst = sorted(rows, key=lambda row: -float(row["slowdown"]))[:10]
    columns = ("model", "beside", "items", "beside_items", "granted_sms", "beside_asked_sms", "alone_p50_ms", "p50_ms")
    return chart.svg() + "<h3>The ten largest</h3>" + table(worst, (*columns, "p99_ms", "slowdown"))


def _served(rows: Sequence[Row]) -> str:
    names = [_serving.OURS, *_serving.BASELINES]
    cells = sorted({(row["items"], row["load"]) for row in rows})
    groups = []
    for items, load in cells:
        shares = []
        for name in names:
            mine = [r for r in rows if (r["items"], r["load"], r["contender"]) == (items, load, name)]
            offered = sum(row["offered"] for row in mine)
            shares.append(sum(r["attainment"] * r["offered"] for r in mine) / offered if offered else None)
        groups.append((f"{items} row{'s' if items > 1 else ''}, load {load:g}", shares))
    bars = grouped_bars(1120, groups, "attainment", lambda share: f"{100 * share:.1f} %")
    columns = ("pair", "items", "load", "contender", "slo_ms", "offered_per_s", "attainment", "goodput_per_s", "p99_ms")
    return bar_key(names) + f'<div class="wide">{bars}</div>' + table(rows, (*columns, "send_lag_p99_ms"))


def _ways(rows: Sequence[Row]) -> str:
    shared = [row for row in rows if row["way"] != _sharing.ALONE]
    pairs = list(dict.fromkeys(str(row["pair"]) for row in shared))
    lines = []
    for way, graphs in dict.fromkeys((str(row["way"]), int(row["graphs"])) for row in shared):
        line: Row = {"way": way, "CUDA graphs": "yes" if graphs else "no"}
        for pair in pairs:
            mine = [row for row in shared if (row["way"], row["graphs"], row["pair"]) == (way, graphs, pair)]
            if mine:
                p99 = " / ".join(number(float(f"{row['p99_ms']:.3g}")) for row in mine)
                line[pair] = f"{mine[0]['pair_speedup']:.2f}, p99 {p99} ms"
        lines.append(line)
    return table(lines, ("way", "CUDA graphs", *pairs)) if lines else ""


def _segments(rows: Sequence[Row]) -> str:
    return table(rows)


def _groups(rows: Sequence[Row]) -> str:
    found = sorted(float(row["deviation_pct"]) for row in rows)
    chart = Chart(
        2 * _WIDTH, _HEIGHT, title=f"{len(found)} groups, median {median(found):.2f} %", x=(0.0, 100.0),
        y=(0.0, round_up(max(found[-1], 0.1))), x_label="percent of the groups", y_label="deviation, %",
    )  # fmt: skip
    chart.marks([(100 * (at + 0.5) / len(found), value) for at, value in enumerate(found)], "square", "s2")
    return chart.svg()


def _resplits(rows: Sequence[Row]) -> str:
    return table(rows)
