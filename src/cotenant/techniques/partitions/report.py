"""Picture of a plan for the terminal or as an SVG: a bar for every device with its partitions to scale, and tables.

A partition's bar is its duty cycle: letters are executions of slots, to scale, and dots are idle time. Alternating
letters are the slots of a group. Every tenant has a letter and a colour (palette of Okabe and Ito, safe for colour
blindness); the picture is readable without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cotenant.report.fitted_table import FittedTable
from cotenant.report.pictures import MOST_WIDTH, Keys, in_ms, key_text, keys_of, svg_of
from cotenant.report.tables import milliseconds
from cotenant.techniques.partitions.plan.assess import Assessment, DeviceView, PartitionView, SlotView

_GAUGE = 24
"""Columns of a slack gauge, in pictures of the largest width."""
_GAUGE_KEY = "Gauges show SLOs: ▒ longest wait (one duty cycle), █ execution, ░ slack."
MOST_MISSED = 0.01
"""Share of missed SLOs in the simulation, above which more headroom is advised."""
_NARROW = 3


def sized(size: int, whole: int) -> str:
    """A size in words: percent if the whole device is 100, else cores."""
    if whole == 100:
        return f"{size} %"
    return f"{size} core{'s' if size > 1 else ''}"


def plan_picture(assessment: Assessment, width: int = 80) -> RenderableType:
    """Bars and lists of all devices, at most `width` columns wide; equal consecutive devices are drawn once.

    From 110 columns on, every slot has a gauge of its SLO.
    """
    width = max(40, min(width, MOST_WIDTH))
    keys = keys_of([tenant.tenant for tenant in assessment.tenants])
    parts: list[RenderableType] = []
    numbered = list(enumerate(assessment.devices))
    for _, same in groupby(numbered, key=lambda each: each[1]):
        group = list(same)
        first, last = group[0][0], group[-1][0]
        name = f"device {first}" if first == last else f"devices {first} to {last}, each"
        parts += [_heading(name, group[0][1]), *_bar(group[0][1], keys, width)]
        parts += [
            _partition_lines(alike.first, numbers(alike), group[0][1], keys, width)
            for alike in runs_of(group[0][1].partitions)
        ]
        parts.append(Text())
    if width == MOST_WIDTH:
        parts.append(Text(_GAUGE_KEY, style="dim"))
    return Group(*parts)


def plan_svg(assessment: Assessment, title: str) -> str:
    """The picture as the text of a self-contained SVG file."""
    return svg_of(plan_picture(assessment, MOST_WIDTH), title)


@dataclass(frozen=True, slots=True)
class Alike:
    """Equal consecutive partitions, from position `start` to `end`."""

    first: PartitionView
    start: int
    end: int


def runs_of(partitions: Sequence[PartitionView]) -> tuple[Alike, ...]:
    """The partitions, with equal consecutive ones combined."""
    found = []
    for partition, same in groupby(enumerate(partitions), key=lambda each: each[1]):
        positions = [position for position, _ in same]
        found.append(Alike(partition, positions[0], positions[-1]))
    return tuple(found)


def numbers(alike: Alike) -> str:
    """Positions of equal partitions in words."""
    return str(alike.start) if alike.start == alike.end else f"{alike.start} to {alike.end}, each"


def tenant_table(assessment: Assessment, missed: Mapping[str, float] | None = None) -> Table:
    """A row per tenant: demand, served rate and slack.

    `missed`: share of queries that were late or dropped in a simulation, by tenant.
    """
    keys = keys_of([tenant.tenant for tenant in assessment.tenants])
    table = FittedTable(keys=2, box=None, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("tenant", no_wrap=True)
    has_tails = any(tenant.tail_slack_ns is not None for tenant in assessment.tenants)
    heads = [
        "demand\n/s",
        "served\n/s",
        "SLO\nms",
        "worst\nms",
        "slack\nms",
        "slack\n%",
        "p99\nslack",
        "full\nat",
        "sim.\nmiss",
    ]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for tenant in assessment.tenants:
        style = "" if tenant.slack_ns >= 0 and tenant.growth >= 1 else "bold reverse"
        table.add_row(
            key_text(keys, tenant.tenant),
            Text(tenant.tenant),
            milliseconds(tenant.rate_per_s),
            milliseconds(min(tenant.planned_per_s, tenant.rate_per_s)),
            milliseconds(tenant.slo_ns / 1e6),
            milliseconds(tenant.worst_ns / 1e6),
            milliseconds(tenant.slack_ns / 1e6),
            f"{100 * tenant.slack_ns / tenant.slo_ns:.0f}",
            milliseconds(None if tenant.tail_slack_ns is None else tenant.tail_slack_ns / 1e6),
            f"{tenant.growth:.2f}x",
            _missed((missed or {}).get(tenant.tenant)),
            style=style,
        )
    table.caption = _caption(has_tails)
    table.caption_justify = "left"
    table.caption_style = "dim"
    return table


def summary_lines(assessment: Assessment, facts: Mapping[str, Any], notes: Sequence[str]) -> Iterator[str]:
    """The results in sentences.

    `facts` has the keys of the command's JSON: planner, headroom, devices_there, devices_used, and either
    least_devices and growth, or same_profile.
    """
    used, there = facts["devices_used"], facts["devices_there"]
    room = "headroom for Poisson arrivals" if facts.get("poisson") else f"{100 * facts['headroom']:g} % headroom"
    by = f"planned by {facts['planner'] or 'hand'} with {room}"
    if "same_profile" in facts:
        yield f"The plan holds on {used} of {there} device{'' if there == 1 else 's'}; {by}."
        if not facts["same_profile"]:
            yield "The plan was made from another profile than it was checked against."
    else:
        least = f"this planner needs at least {facts['least_devices']}"
        yield f"The tenants fit on {used} of {there} device{'' if there == 1 else 's'}; {least}; {by}."
    first = assessment.first
    yield (
        f"With this plan, tenant {first.tenant!r} breaks first if all rates grow: its batches are full at "
        f"{first.growth:.2f} times the rates."
    )
    growth = facts.get("growth")
    if growth is not None:
        if growth.breaks is None:
            yield f"With a new plan, all rates may grow at least {growth.factor:g} times (larger factors not tried)."
        else:
            yield (
                f"With a new plan, all rates may grow {growth.factor:.4g} times; at {growth.until:.4g} times, "
                f"{growth.breaks.tenant!r} breaks first ({growth.breaks.constraint})."
            )
    simulated = facts.get("simulated")
    if simulated is not None:
        worst = max(simulated["outcomes"], key=lambda each: each["violation_share"])
        how = f"Poisson arrivals ({simulated['seconds']:.3g} s, seed {simulated['seed']})"
        share = worst["violation_share"]
        worst_text = f"{worst['name']!r} misses most SLOs, {_missed(share)} of them" if share else "no SLO is missed"
        promised = facts.get("misses")
        promise = f"; at most {_missed(promised)} are promised" if promised is not None else ""
        yield f"Simulated with {how}: {worst_text}{promise}."
        rows = [tenant.tenant for tenant in assessment.tenants]
        for each in simulated["outcomes"]:
            if each["name"] not in rows:
                yield f"  Application {each['name']!r} as a whole misses {_missed(each['violation_share'])}."
        if worst["violation_share"] > MOST_MISSED:
            yield "  For bursts, plan with --poisson or more --headroom."
    yield "Checked: the plan passed the independent checker."
    yield from (f"  {note}" for note in notes)


def _missed(share: float | None) -> str:
    if share is None:
        return "–"
    return "<0.1%" if 0 < share < 0.001 else f"{100 * share:.1f}%"


def _caption(has_tails: bool) -> str:
    tails = "p99 slack: with executions at p99, in ms. " if has_tails else ""
    return (
        f"worst: one duty cycle plus the execution beside the worst neighbours. {tails}"
        "full at: factor on the rate at which its batches are full. "
        "sim. miss: late or dropped with Poisson arrivals."
    )


def _heading(name: str, device: DeviceView) -> Text:
    used = sum(partition.size for partition in device.partitions)
    busy = sum(partition.size * partition.load for partition in device.partitions) / device.whole
    of = f"{used} of {sized(device.whole, device.whole)}"
    text = f"{name} · {device.device} · {of} in partitions, {100 * busy:.0f} % busy"
    if device.memory_used_bytes:
        text += f" · {device.memory_used_bytes / 2**30:.2g} GiB"
        if device.memory_bytes < 2**53:
            text += f" of {device.memory_bytes / 2**30:.3g}"
    return Text(text, style="bold")


def _bar(device: DeviceView, keys: Keys, width: int) -> list[Text]:
    """Three lines: an edge with the names of partitions, the duty cycles, and an edge."""
    sizes = [partition.size for partition in device.partitions]
    unused = device.whole - sum(sizes)
    widths = columns_of([*sizes, *([unused] if unused else [])], width - 1)
    top, middle, bottom = Text("┌"), Text("│"), Text("└")
    for index, cells in enumerate(widths):
        inner = cells - 1
        last = index == len(widths) - 1
        if index < len(sizes):
            label = f" {index} " if inner < 9 else f" {index}: {sized(sizes[index], device.whole)} "
            middle.append_text(_duty(device.partitions[index], keys, inner))
        else:
            label = " unused "
            middle.append("╱" * inner, style="dim")
        label = label if len(label) <= inner else ""
        top.append(label.center(inner, "─") + ("┐" if last else "┬"))
        middle.append("│")
        bottom.append("─" * inner + ("┘" if last else "┴"))
    return [top, middle, bottom]


def columns_of(sizes: Sequence[int], width: int) -> list[int]:
    """Widths in proportion to the sizes, `width` in all if each is at least three columns."""
    total = sum(sizes)
    edges = [round(width * sum(sizes[: index + 1]) / total) for index in range(len(sizes))]
    return [max(_NARROW, edge - before) for before, edge in zip([0, *edges], edges, strict=False)]


def _duty(partition: PartitionView, keys: Keys, cells: int) -> Text:
    """The duty cycle of a partition: each slot as wide as its execution, at least one letter; the letters of a group
    alternate."""
    text, at, used = Text(), 0.0, 0
    steps = [list(step) for _, step in groupby(enumerate(partition.slots), lambda each: each[1].group or -1 - each[0])]
    for position, step in enumerate(steps):
        at += cells * step[0][1].execution_ns / partition.duty_ns
        left = len(steps) - position - 1
        end = min(max(round(at), used + 1), max(used, cells - left))
        for column in range(end - used):
            text.append_text(key_text(keys, step[column % len(step)][1].tenant, bare=True))
        used = end
    text.append("·" * (cells - used), style="dim")
    return text


def _partition_lines(
    partition: PartitionView,
    name: str,
    device: DeviceView,
    keys: Keys,
    width: int,
) -> RenderableType:
    head = Text(f"{name}: {sized(partition.size, device.whole)}", style="bold")
    head.append(f"  duty cycle {in_ms(partition.duty_ns)} ms, {100 * partition.load:.0f} % busy", style="not bold")
    gauge = _GAUGE if width == MOST_WIDTH else 0
    table = FittedTable(keys=2, box=None, padding=(0, 1), pad_edge=False, show_header=False, expand=bool(gauge))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, ratio=1 if gauge else None)
    for _ in range(5 if gauge else 4):
        table.add_column(justify="right", no_wrap=True)
    for slot in partition.slots:
        beside = f" (x{slot.factor:.2f})" if slot.factor > 1.005 else ""
        if slot.group:
            others = [other for other in partition.slots if other.group == slot.group and other is not slot]
            names = "".join(keys[other.tenant][0] for other in others)
            beside += f" with {names} ({in_ms(slot.in_turn_ns)} in turn)"
        table.add_row(
            Text("  ").append_text(key_text(keys, slot.tenant)),
            Text(slot.tenant),
            f"batch {slot.batch}",
            f"{milliseconds(slot.rate_per_s)} /s",
            f"runs {in_ms(slot.execution_ns)} ms{beside}",
            f"slack {in_ms(slot.slack_ns)} ms ({100 * slot.slack_ns / slot.slo_ns:.0f} %)",
            *([_slack_gauge(partition, slot)] if gauge else []),
        )
    return Group(head, table)


def _slack_gauge(partition: PartitionView, slot: SlotView) -> str:
    """Gauge of a slot's SLO: the longest wait (a duty cycle), the execution, and the slack."""
    waits = min(_GAUGE, round(_GAUGE * partition.duty_ns / slot.slo_ns))
    ends = min(_GAUGE, max(waits + 1, round(_GAUGE * (partition.duty_ns + slot.execution_ns) / slot.slo_ns)))
    return "▒" * waits + "█" * (ends - waits) + "░" * (_GAUGE - ends)
