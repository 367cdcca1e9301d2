"""What a run leaves in its folder: tables, a profile and samples of groups that cotenant reads, and all in one file."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import _belief, _latency, _serving, _sharing
from bench.gpu._fingerprint import Fingerprint
from bench.gpu._journal import Journal, Row
from bench.gpu._tables import to_csv, write_text
from cotenant import __version__

TABLES = (_latency.LATENCY, _latency.CORUN, _latency.UNITS, _serving.SERVING, _sharing.GROUPS)
PROFILE, GROUPS, DEVICE, PACKED = "profile.json", "groups.jsonl", "device.json", "results.tgz"
_POINT = ("p50", "p90", "p95", "p99")


def write_folder(
    folder: Path, journal: Journal, device: Fingerprint, notes: Sequence[Row], command: str, now: str
) -> None:
    """Write everything anew from the journal. Models that are not open give their units no estimate of cost."""
    for name in TABLES:
        rows = journal.rows(name)
        if rows:
            write_text(folder / f"{name}.csv", to_csv(rows))
    summary: Row = {"device": device.to_json(), "created": now, "command": command, "cotenant": __version__}
    summary |= {"notes": list(notes), "failures": journal.failures, "figures": figures(journal)}
    write_text(folder / DEVICE, json.dumps(summary, indent=1) + "\n")
    models = profile_models(journal)
    if models:
        profile = {"device": as_device(device), "created": now, "command": command, "models": models}
        write_text(folder / PROFILE, json.dumps({**profile, "format": "cotenant-profile/1"}, indent=1) + "\n")
    groups = group_lines(journal, device, now, command)
    if groups:
        write_text(folder / GROUPS, "".join(json.dumps(line) + "\n" for line in groups))
    _pack(folder)


def _pack(folder: Path) -> None:
    """All files of the folder in one: from a machine that is had for half an hour few files come back."""
    partial = folder / f"{PACKED}.part"
    with tarfile.open(partial, "w:gz") as packed:
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(PACKED):
                packed.add(path, f"{folder.name}/{path.name}")
    partial.replace(folder / PACKED)


def figures(journal: Journal) -> dict[str, float]:
    """The figures that benchmarks report, as far as the measurements allow."""
    found: dict[str, float] = dict(_serving.gains(journal.rows(_serving.SERVING)))
    found |= _latency.corun_figures(journal.rows(_latency.CORUN))
    found |= _sharing.group_figures(journal.rows(_sharing.GROUPS))
    return found


def as_device(device: Fingerprint) -> dict[str, Any]:
    """The fingerprint as `profile.device.Device`; its cores are the SMs."""
    versions = {"python": device.python, "torch": device.torch, "cotenant": __version__}
    versions |= {key: value for key, value in (("cuda", device.cuda), ("driver", device.driver)) if value}
    return {
        "processor": device.name,
        "cores": device.units,
        "memory_bytes": device.memory_bytes,
        "system": device.system,
        "versions": versions,
        "fingerprint": device.digest,
    }


def profile_models(journal: Journal) -> dict[str, Any]:
    """`profile.table.ModelProfile` of each model with latencies and segments; its cores are SMs."""
    found: dict[str, Any] = {}
    latencies = journal.rows(_latency.LATENCY)
    for name in dict.fromkeys(str(row["model"]) for row in latencies):
        rows = [row for row in latencies if row["model"] == name]
        parts = sorted(journal.get(_latency.UNITS, name) or [], key=lambda row: row["start"])
        if not rows or not parts:
            continue
        found[name] = {
            "digest": f"zoo:{name}",
            "points": [
                {"shape": 0, "items": row["items"], "cores": row["asked_sms"], "runs": row["runs"]}
                | {f"{q}_ns": max(1, round(row[f"{q}_ms"] * 1e6)) for q in _POINT}
                for row in sorted(rows, key=lambda row: (row["asked_sms"], row["items"]))
            ],
            "unit_ns": _belief.unit_ns(parts),
            "cuts": [0, *(int(row["end"]) for row in parts)],
            "segment_ratio": _belief.segment_ratio(parts),
        }
    return found


def group_lines(journal: Journal, device: Fingerprint, now: str, command: str) -> list[Any]:
    """A header and samples as `predict.samples.load_samples` reads them, for a predictor to be fitted to."""
    samples = []
    names: dict[str, str] = {}
    for row in journal.rows(_sharing.GROUPS):
        members = [_member(text) for text in str(row["what"]).split(" | ")]
        names |= {member[0]: f"zoo:{member[0]}" for member in members}
        samples.append({"members": members, "runs_ns": [int(each) for each in str(row["runs_ns"]).split()]})
    if not samples:
        return []
    header = {"fingerprint": device.digest, "created": now, "command": command, "digests": names}
    return [{**header, "format": "cotenant-groups/1"}, *samples]


def _member(text: str) -> list[Any]:
    name, *numbers = text.split()
    return [name, *map(int, numbers)]
