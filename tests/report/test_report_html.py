from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cotenant.errors import InvalidValueError
from cotenant.metrics import OutcomeLog
from cotenant.report.charts import latency_distribution, latency_over_time, latency_range_ms
from cotenant.report.html import RunResult, Section, write_report
from cotenant.report.machine import machine_facts
from cotenant.report.svg import Scale, duration, grouped_bars, round_up
from cotenant.trace.bound import RunBound, TenantBound
from cotenant.trace.lost import Loss, LossAccount
from cotenant.types import LossCause, Outcome
from tests.support.scenario import TWO_LANES, tables

S = 1_000_000_000
SLO = {"ocr": 400_000_000, "<b>evil</b>": 20_000_000}
MOMENT = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
VOID = {"meta", "br", "path", "rect"}


class Reader(HTMLParser):
    """Checks that tags close in order; keeps the text and the attributes that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def run(name: str, late_from: int, count: int = 100) -> RunResult:
    """Ten queries a second and tenant; from number `late_from` on, every other one is late and the rest dropped."""
    log = OutcomeLog(SLO)
    for tenant, slo_ns in SLO.items():
        for i in range(count):
            due_ns = i * S // 10
            if i < late_from:
                log.add(tenant, due_ns, due_ns + slo_ns // 2, Outcome.ANSWERED)
            else:
                outcome = Outcome.LATE if i % 2 else Outcome.DROPPED
                log.add(tenant, due_ns, due_ns + 2 * slo_ns, outcome)
    return RunResult.of(name, log, end_ns=count * S // 10, slo_ns=SLO, description={"policy": name})


def read(path: Path, runs: list[RunResult], **other: object) -> tuple[str, Reader]:
    write_report(path / "r.html", runs, created=MOMENT, **other)  # type: ignore[arg-type]
    text = (path / "r.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return text, reader


def test_report_is_one_sound_file_that_loads_nothing(tmp_path: Path) -> None:
    text, reader = read(tmp_path, [run("fcfs", 30), run("edf", 90)])
    assert reader.loads == []
    assert "url(" not in text
    assert "script" not in reader.tags
    assert "b" not in {tag for tag in reader.tags if "evil" in tag}
    assert "<b>evil</b>" not in text
    assert "prefers-color-scheme: dark" in text


def test_headline_and_tables_say_what_the_runs_achieved(tmp_path: Path) -> None:
    _, reader = read(tmp_path, [run("fcfs", 30), run("edf", 90)])
    text = " ".join("".join(reader.text).split())
    assert "edf answered 90.0 % of all queries within their SLO, fcfs 30.0 %." in text
    assert "2026-01-02 03:04 UTC" in text
    assert text.count("<b>evil</b>") >= 4


def test_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    first, _ = read(tmp_path, [run("fcfs", 30)])
    second, _ = read(tmp_path, [run("fcfs", 30)])
    assert first == second


def test_sections_profiles_traces_and_machine_are_shown(tmp_path: Path) -> None:
    _, reader = read(
        tmp_path,
        [run("edf", 90)],
        sections=[Section("Recognised", "First.\n\nSecond.", "TOTAL < 12")],
        profiles=[{"model": "ocr", "ms": 12.34567}],
        traces={"edf": "edf.json"},
        machine={"processor": "abacus"},
    )
    text = "".join(reader.text)
    for wanted in ("Recognised", "First.", "TOTAL < 12", "12.35", "edf.json", "ui.perfetto.dev", "abacus"):
        assert wanted in text


def test_what_could_have_been_is_shown(tmp_path: Path) -> None:
    tenants = (
        TenantBound("ocr", 1.0, 100, 30, 2e6, 1.25, 0.5, 40.0),
        TenantBound("<b>evil</b>", 1.0, 100, 60, 1e6, 1.0, 0.5, 60.0),
    )
    found = RunBound(tenants, 2, most=120.0, shares=100.0, weighted=120.0, fair=0.6, limited_by=("ocr",))
    _, reader = read(tmp_path, [run("fcfs", 30), run("edf", 90)], bounds={"edf": found})
    text = "".join(reader.text)
    assert text.count("75.0 % of the upper bound of any schedule") == 1
    assert "at most 120 of 200 queries could be answered in time, 90 were: 75.0 % of the bound." in text
    assert "(by the demand of ocr) and was 30.0 %: 50.0 % of the bound." in text
    assert "as it could alone on its share: 90.0 % of the bound, but ocr had 30 of its 40." in text
    assert "1.25x" in text
    _, reader = read(tmp_path, [run("edf", 90)])
    assert "any schedule" not in "".join(reader.text)


def test_what_was_lost_is_shown_by_cause(tmp_path: Path) -> None:
    account = LossAccount(tables({"<b>a": 1}), TWO_LANES)
    for cause, culprit in ((LossCause.NEIGHBOUR, "<i>b"), (LossCause.NEIGHBOUR, "<i>b"), (LossCause.FRONT_END, "")):
        account._lose(Loss(0, "<b>a", 0, 1, Outcome.DROPPED, cause, culprit))
    text, reader = read(tmp_path, [run("edf", 90)], losses={"edf": account})
    shown = " ".join("".join(reader.text).split())
    assert "Lost queries and their causes" in shown
    assert "tenantlostothertenantsfrontend<b>a321" in shown.replace(" ", "")
    assert "<b>a lost 2 to <i>b" in shown
    assert "<i>b" not in text
    assert "What was lost" not in read(tmp_path, [run("edf", 90)])[0]


def test_a_run_without_any_query_can_be_shown(tmp_path: Path) -> None:
    empty = RunResult.of("idle", OutcomeLog(), end_ns=S, slo_ns=SLO)
    _, reader = read(tmp_path, [empty])
    assert "No query was offered." in "".join(reader.text)
    assert "0.0 %" not in "".join(reader.text)


def test_runs_need_distinct_names(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="distinct names"):
        write_report(tmp_path / "r.html", [run("a", 1), run("a", 2)])
    with pytest.raises(InvalidValueError):
        write_report(tmp_path / "r.html", [])


def test_distribution_ends_at_the_share_that_got_an_answer() -> None:
    """Thirty answered and thirty-five late of a hundred: the curve must end at 65 %, not at 100 %."""
    chart = latency_distribution([run("fcfs", 30)], "ocr")
    curve = re.search(r'class="line s0" d="([^"]+)"', chart)
    ticks = {text: float(y) for y, text in re.findall(r'<text class="tick end" x="[\d.]+" y="([\d.]+)">(\d+) %', chart)}
    assert curve is not None
    last_y = float(curve[1].rpartition("V")[2])
    bottom, top = ticks["0"] - 4, ticks["100"] - 4
    assert (bottom - last_y) / (bottom - top) == pytest.approx(0.65, abs=0.01)


def test_busy_charts_are_thinned_and_say_so() -> None:
    busy = run("fcfs", 4000, count=6000)
    chart, stride = latency_over_time(busy, "ocr", latency_range_ms([busy], "ocr"))
    marks = sum(path.count("M") for path in re.findall(r'class="mark [^"]+" d="([^"]+)"', chart))
    assert stride == 4
    assert marks == 4000 // 4 + 1000 // 4 * 2


def test_bars_are_as_long_as_their_shares() -> None:
    chart = grouped_bars(1000, [("a", [0.25, 1.0]), ("b", [0.5, None])], "t", lambda share: f"{share:g}")
    widths = [float(width) for width in re.findall(r'<rect class="c\d" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', chart)]
    assert widths[0] / widths[1] == pytest.approx(0.25, abs=0.001)
    assert widths[2] / widths[1] == pytest.approx(0.5, abs=0.001)
    assert ">–</text>" in chart


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 60, 0, 1), [0, 10, 20, 30, 40, 50, 60]),
        (Scale(0, 0.7, 0, 1), [0, 0.2, 0.4, 0.6]),
        (Scale(8, 1300, 0, 1, log=True), [10, 20, 50, 100, 200, 500, 1000]),
        (Scale(0.5, 2e4, 0, 1, log=True), [1, 10, 100, 1000, 10000]),
    ],
)
def test_ticks_are_round_and_inside(scale: Scale, ticks: list[float]) -> None:
    assert scale.ticks() == ticks


def test_scale_maps_ends_and_keeps_outliers_on_the_edge() -> None:
    scale = Scale(1, 100, 10, 210, log=True)
    assert [scale(value) for value in (1, 10, 100, 0.001, 1e9)] == pytest.approx([10, 110, 210, 10, 210])


def test_durations_and_axis_ends_read_well() -> None:
    assert [duration(ms) for ms in (0.05, 1, 250, 1000, 2500)] == ["50 µs", "1 ms", "250 ms", "1 s", "2.5 s"]
    assert [round_up(value) for value in (0, 0.7, 9, 11, 41, 100)] == pytest.approx([1, 0.8, 10, 15, 50, 100])


def test_machine_facts_name_processor_and_versions() -> None:
    facts = machine_facts()
    assert facts["processor"]
    assert re.match(r"\d+ of \d+", facts["cores"])
    assert facts["Python"].startswith("3.")
