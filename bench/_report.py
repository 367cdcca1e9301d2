"""The results that are kept, as one markdown table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench._disturbed import disturbed_text
from bench._record import RESULTS

_NOT_SHOWN = ("fingerprint", "pace_us")


def report(folder: Path = RESULTS) -> str:
    """A line per metric of every result in `folder`, and the devices that they were taken on below.

    The pace is the mean of that before and after, in ms.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not records:
        return "No results are kept yet: a full run with --json keeps its own."
    lines = ["| benchmark | metric | value | date | device | pace |", "|---|---|---:|---|---|---:|"]
    devices: dict[str, int] = {}
    for record in records:
        number = devices.setdefault(_device_text(record["device"]), len(devices) + 1)
        lines += _lines(record, number)
    lines += ["", *(f"{number}. {text}" for text, number in devices.items())]
    disturbed = [(record["name"], disturbed_text(record["rows"])) for record in records]
    lines += (
        ["", *(f"{name}: {text}" for name, text in disturbed if text)] if any(text for _, text in disturbed) else []
    )
    return "\n".join(lines)


def _lines(record: dict[str, Any], device: int) -> Iterator[str]:
    paces = record["device"].get("pace_us")
    pace = f"{sum(paces) / len(paces) / 1000:.2f}" if paces else "-"
    for metric, value in record["summary"].items():
        yield f"| {record['name']} | `{metric}` | {_text(value)} | {record['date'][:10]} | {device} | {pace} |"


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _device_text(device: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in device.items() if key not in _NOT_SHOWN)
