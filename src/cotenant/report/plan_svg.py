"""A plan as a stand-alone SVG: every device with its partitions to scale, and what is left of every SLO.

Beside their colours, of Okabe and Ito, tenants carry letters; it can be read in black and white.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import groupby

from cotenant.plan.assess import Assessment, DeviceView, PartitionView, SlotView
from cotenant.report.plan_text import keys_of, numbers, runs_of, short, sized
from cotenant.report.tables import milliseconds

WIDTH = 1080
_LEFT, _RIGHT = 24, WIDTH - 24
_BAR, _ROW, _HEAD = 46, 26, 24
_GAUGE = 560, 240
"""Left edge and width of the gauges of slack."""
_LETTER = 9.0
"""Pixels that a letter in a bar needs."""
_DARK = ("#0072b2", "#d55e00", "#009e73")
_STYLE = (
    "text{font:13px system-ui,'Segoe UI',Roboto,sans-serif;fill:#1b1f24}.t{font-size:18px;font-weight:600}"
    ".h{font-size:14px;font-weight:600}.s{fill:#5b6470}.e{text-anchor:end}.m{text-anchor:middle}.k{font-weight:700}"
    ".w{fill:#fff}.f{fill:none;stroke:#1b1f24;stroke-width:1.5}.l{stroke:#b42318;stroke-width:1.5}"
)

Keys = Mapping[str, tuple[str, str]]


class _Page:
    """Marks from the top down."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 0.0

    def text(self, x: float, y: float, text: str, css: str = "") -> None:
        named = f' class="{css}"' if css else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title></rect>" if title else "</rect>"
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {place} fill="{fill}">{inside}')

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        self.parts.append(f'<rect class="f" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>')


def plan_svg(assessment: Assessment, title: str) -> str:
    """The picture as the text of an SVG file. Equal devices in a row are drawn once.

    `title` is its heading up to "; ", and the line below from there.
    """
    keys = keys_of([tenant.tenant for tenant in assessment.tenants])
    page = _Page()
    heading, _, rest = title.partition("; ")
    page.text(_LEFT, 34, heading, "t")
    page.text(_LEFT, 56, rest, "s")
    page.text(_LEFT, 80, "Partitions are to scale; within one, each batch takes its part of the duty cycle.", "s")
    left, _ = _GAUGE
    for at, colour, label in ((0, "#a2abb6", "waits"), (62, "#1b1f24", "runs"), (116, "#e8ebef", "slack")):
        page.box(left + at, 70, 12, 12, colour)
        page.text(left + at + 17, 80, label, "s")
    page.text(left + 176, 80, "of each SLO, at worst (red: the SLO)", "s")
    page.y = 88
    for _, same in groupby(enumerate(assessment.devices), key=lambda each: each[1]):
        group = list(same)
        _device(page, group[0][0], group[-1][0], group[0][1], keys)
    height = round(page.y + 12)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title, quote=True)}"><title>{escape(title)}</title><style>{_STYLE}</style>'
        '<defs><pattern id="unused" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="8" height="8" fill="#fff"/><path d="M0 0V8" stroke="#c3c9d1" stroke-width="2"/></pattern></defs>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(page.parts)}</svg>\n'
    )


def _device(page: _Page, first: int, last: int, device: DeviceView, keys: Keys) -> None:
    used = sum(partition.size for partition in device.partitions)
    name = f"Device {first}" if first == last else f"Devices {first} to {last}, each"
    busy = sum(partition.size * partition.load for partition in device.partitions) / device.whole
    facts = f"{device.device}, {used} of {sized(device.whole, device.whole)} in partitions, {100 * busy:.0f} % busy"
    if device.memory_used_bytes:
        facts += f", {device.memory_used_bytes / 2**30:.2g} GiB of models"
    page.text(_LEFT, page.y + 24, f"{name}: {facts}", "h")
    top = page.y + 34
    scale = (_RIGHT - _LEFT) / device.whole
    x = float(_LEFT)
    for partition in device.partitions:
        _duty(page, x, top, partition.size * scale, partition, keys)
        x += partition.size * scale
    if used < device.whole:
        page.box(x, top, _RIGHT - x, _BAR, "url(#unused)", "unused")
        page.frame(x, top, _RIGHT - x, _BAR)
    page.y = top + _BAR + 6
    for alike in runs_of(device.partitions):
        partition = alike.first
        head = f"Partition{'s' if alike.end > alike.start else ''} {numbers(alike)}: "
        head += f"{sized(partition.size, device.whole)}, duty cycle {_ms(partition.duty_ns)} ms"
        page.text(_LEFT, page.y + 17, f"{head}, {100 * partition.load:.0f} % busy")
        page.y += _HEAD
        for slot in partition.slots:
            _slot(page, partition, slot, keys)
    page.y += 14


def _duty(page: _Page, x: float, y: float, width: float, partition: PartitionView, keys: Keys) -> None:
    page.box(x, y, width, _BAR, "#f2f4f7", f"idle for {100 * (1 - partition.load):.0f} % of the duty cycle")
    at = x
    for slot in partition.slots:
        letter, colour = keys[slot.tenant]
        wide = width * slot.execution_ns / partition.duty_ns
        page.box(at, y, wide, _BAR, colour, f"{slot.tenant}: batch {slot.batch} runs {_ms(slot.execution_ns)} ms")
        ink = "w " if colour in _DARK else ""
        label = f"{letter}  {slot.tenant}"
        if wide >= _LETTER * len(label):
            page.text(at + 6, y + 20, label, f"{ink}k")
            page.text(at + 6, y + 37, f"batch {slot.batch}, {milliseconds(slot.rate_per_s)} /s", ink.strip())
        elif wide >= _LETTER:
            page.text(at + wide / 2, y + 28, letter, f"{ink}m k")
        at += wide
    page.frame(x, y, width, _BAR)


def _slot(page: _Page, partition: PartitionView, slot: SlotView, keys: Keys) -> None:
    """One line: the letter, the tenant, its batch and rate, and a gauge of its SLO."""
    letter, colour = keys[slot.tenant]
    y = page.y
    page.box(_LEFT + 10, y + 3, 20, 20, colour)
    page.text(_LEFT + 20, y + 18, letter, f"{'w ' if colour in _DARK else ''}m k")
    page.text(_LEFT + 40, y + 18, short(slot.tenant, 26))
    page.text(_LEFT + 300, y + 18, f"batch {slot.batch}", "e")
    page.text(_LEFT + 390, y + 18, f"{milliseconds(slot.rate_per_s)} /s", "e")
    beside = f", x{slot.factor:.2f} beside others" if slot.factor > 1.005 else ""
    left, wide = _GAUGE
    scale = wide / max(slot.slo_ns, partition.duty_ns + slot.execution_ns)
    waits, runs = partition.duty_ns * scale, slot.execution_ns * scale
    page.text(left - 8, y + 18, f"SLO {_ms(slot.slo_ns)} ms", "s e")
    page.box(left, y + 7, wide, 12, "#e8ebef", f"slack {_ms(slot.slack_ns)} ms")
    page.box(left, y + 7, waits, 12, "#a2abb6", f"waits up to {_ms(partition.duty_ns)} ms")
    page.box(left + waits, y + 7, runs, 12, "#1b1f24", f"runs {_ms(slot.execution_ns)} ms{beside}")
    at = left + slot.slo_ns * scale
    page.parts.append(f'<path class="l" d="M{at:.1f} {y + 3:.1f}v20"/>')
    tail = "" if slot.tail_slack_ns is None else f", p99 {_ms(slot.tail_slack_ns)} ms"
    page.text(left + wide + 10, y + 18, f"slack {_ms(slot.slack_ns)} ms, {_percent(slot)} %{tail}")
    page.y += _ROW


def _percent(slot: SlotView) -> str:
    return f"{100 * slot.slack_ns / slot.slo_ns:.0f}"


def _ms(ns: int) -> str:
    return milliseconds(ns / 1e6)
