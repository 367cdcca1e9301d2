"""`cotenant doctor`: what on this machine makes latencies worse or less predictable, and how to change it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from cotenant.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_GIB = 1 << 30
_LEAST_FILES = 4096
_LEAST_BYTES = 4 * _GIB
_MOST_STEAL, _MOST_LOAD = 0.02, 0.5
_OPTIONAL = (
    ("torch", "models in .pt2", "pip install 'cotenant[torch]'"),
    ("PIL", "pictures as inputs", "pip install 'cotenant[zoo]'"),
    ("ortools", "optimal plans", "pip install 'cotenant[solver]'"),
    ("ray", "several machines", "pip install 'cotenant[cluster]'"),
)
"""Package, what it is for, and how to get it."""

_VERSIONS = ("cotenant", "Python", "onnxruntime", "numpy", "grpcio")
_STYLES = {"ok": "green", "warn": "red", "note": "yellow"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `level`: "ok", "warn" (latencies suffer) or "note" (an optional part is not there)."""

    what: str
    level: str
    detail: str
    hint: str = ""


def doctor(as_json: AsJson = False) -> None:
    """Check what this machine gives to a server: cores, limits, power settings, versions, optional parts."""
    from rich.text import Text

    from cotenant.cli.console import console as make_console

    found = list(findings())
    if as_json:
        print_json({"findings": [asdict(each) for each in found]})
    else:
        console = make_console()
        for each in found:
            console.print(Text.assemble((f"{each.level:5}", _STYLES[each.level]), f"{each.what}: {each.detail}"))
            if each.hint:
                console.print(Text(f"     -> {each.hint}", "dim"))
    if any(each.level == "warn" for each in found):
        raise typer.Exit(1)


def findings(root: Path | None = None) -> Iterator[Finding]:
    """All lines. `root` is another root of the file system to read the machine's state from, for tests."""
    from cotenant import linux

    root = root or linux.ROOT
    if not linux.IS_LINUX:
        yield Finding("system", "note", f"{platform.system()}: no serving here", "docs/platforms.md")
    yield from _cores(root)
    yield from _memory(root)
    yield from _power(root)
    yield from _limits()
    yield from _versions()


def _cores(root: Path) -> Iterator[Finding]:
    from cotenant import linux
    from cotenant.execute.layout import usable_cores

    cores = linux.available_cores()
    quota = linux.cpu_quota(root)
    text = f"{len(cores)} of {os.cpu_count()} usable"
    if quota is None or quota >= len(cores):
        yield Finding("cores", "ok", text)
    else:
        used = len(usable_cores(root))
        throttled = linux.throttled_periods(root)
        detail = f"{text}, a quota of {quota:g} (throttled {throttled} times): lanes on {used}"
        hint = "whole cores (a cpuset, or Kubernetes' static CPU manager) avoid pauses of up to 100 ms"
        yield Finding("cores", "warn", detail, hint)
    if twins := [each for each in linux.siblings(root) if len(set(each) & set(cores)) > 1]:
        hint = f"give lanes one thread a core: device.cores = {[each[0] for each in twins][:8]}"
        yield Finding("SMT", "note", f"{len(twins)} cores have two or more threads here: lanes slow each other", hint)
    total, steal = linux.core_times(root)
    if total:
        has_steal_time = steal > _MOST_STEAL * total
        hint = "the host has more work than cores: take dedicated ones" if has_steal_time else ""
        level, detail = "warn" if has_steal_time else "ok", f"{steal / total:.1%} since the start"
        yield Finding("steal time", level, detail, hint)
    load = linux.load_average()
    if load is None:
        return
    busy = load > _MOST_LOAD * len(cores)
    hint = "profiles and latencies are worse while other processes run" if busy else ""
    yield Finding("load", "warn" if busy else "ok", f"{load:.1f} on {len(cores)} cores in the last minute", hint)


def _memory(root: Path) -> Iterator[Finding]:
    from cotenant import linux

    have = linux.total_memory_bytes()
    if not have:
        yield Finding("memory", "note", "unknown on this system")
        return
    limit = linux.memory_limit_bytes(root)
    least = min(have, limit or have)
    text = f"{have / _GIB:.1f} GiB" + (f", limited to {limit / _GIB:.1f}" if limit and limit < have else "")
    is_small = least < _LEAST_BYTES
    hint = "each model has a process of its own, of about 0.2 GiB plus its weights" if is_small else ""
    yield Finding("memory", "warn" if is_small else "ok", text, hint)


def _power(root: Path) -> Iterator[Finding]:
    from cotenant import linux

    governor = linux.governor(root)
    if governor:
        is_slow = governor not in ("performance", "schedutil")
        hint = "cpupower frequency-set -g performance" if is_slow else ""
        yield Finding("frequency governor", "warn" if is_slow else "ok", governor, hint)
    path = root / "dev/cpu_dma_latency"
    if not linux.IS_LINUX:
        return
    if os.access(path, os.W_OK):
        yield Finding("idle states", "ok", "the server may keep cores from sleeping")
    else:
        yield Finding("idle states", "note", f"{path} cannot be written", "up to 0.1 ms a query; docs/configuration.md")


def _limits() -> Iterator[Finding]:
    from cotenant import linux

    limits = linux.open_file_limits()
    if limits is None:
        return
    soft, hard = limits
    is_low = 0 <= soft < _LEAST_FILES
    detail = f"{'no limit' if soft < 0 else soft} (at most {'no limit' if hard < 0 else hard})"
    yield Finding("open files", "warn" if is_low else "ok", detail, f"ulimit -n {_LEAST_FILES}" if is_low else "")


def _versions() -> Iterator[Finding]:
    import importlib.util

    from cotenant.report.machine import machine_facts

    facts = machine_facts()
    found = ", ".join(f"{name} {facts[name]}" for name in _VERSIONS if name in facts)
    yield Finding("versions", "ok", found)
    for package, what, install in _OPTIONAL:
        is_there = importlib.util.find_spec(package) is not None
        yield Finding(
            what, "ok" if is_there else "note", "there" if is_there else "not installed", "" if is_there else install
        )
