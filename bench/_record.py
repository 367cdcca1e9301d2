"""A benchmark's result as the project keeps it: figures, place, time and command."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench._registry import FOLDER
from cotenant import __version__
from cotenant.profiles.device import this_device

RESULTS = FOLDER / "results"
_PACKAGES = (
    *("numpy", "onnx", "onnxruntime", "grpcio", "protobuf", "uvloop", "httptools", "msgspec"),
    *("scipy", "scikit-learn", "ortools", "numba"),
)


def make_record(
    name: str, command: str, result: Mapping[str, Any], pace_us: tuple[float, float] | None = None
) -> dict[str, Any]:
    """Put a benchmark's `summary`, `rows` and optional `seeds` and `versions` into the form that is kept.

    `pace_us` is the pace of the machine before and after it.

    Figures that are not finite become None: JSON has no name for them.
    """
    return {
        "name": name,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device() | ({"pace_us": _plain(pace_us)} if pace_us else {}),
        "versions": {**versions(), **result.get("versions", {})},
        "seeds": list(result.get("seeds", [])),
        "summary": {metric: _plain(value) for metric, value in result["summary"].items()},
        "rows": [_plain(row) for row in result["rows"]],
    }


def device() -> dict[str, Any]:
    """What the figures were taken on."""
    return {key: value for key, value in asdict(this_device()).items() if key != "versions"}


def versions() -> dict[str, str]:
    """cotenant, Python, and the packages that a query passes through."""
    is_optimised = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    build = "with" if is_optimised else "without"
    found = {
        "cotenant": __version__,
        "python": platform.python_version(),
        "python_build": f"{build} profile-guided optimisation",
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def to_line(record: Any) -> str:
    """A record, or a part of one, as one line of JSON."""
    return json.dumps(record, allow_nan=False)


def save(record: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write the record where committed results lie, a line a field and a line a row; give the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['name']}.json"
    rows = ",".join(f"\n  {to_line(row)}" for row in record["rows"])
    lines = [f" {json.dumps(key)}: {to_line(value)}" for key, value in record.items() if key != "rows"]
    lines.append(f' "rows": [{rows}]')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    """Numbers of numpy and the like as JSON knows them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        # Six significant digits: nothing measured here has more.
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
