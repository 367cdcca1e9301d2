"""`cotenant devices`: devices, engines and sharing mechanisms of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotenant.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotenant.execute.devices import Devices, Feature
    from cotenant.report.fitted_table import FittedTable

_GIB = 1 << 30


def devices(as_json: AsJson = False) -> None:
    """Show devices, engines and ways of sharing of this machine, and why others are not available."""
    from dataclasses import asdict

    from cotenant.execute.devices import survey

    found = survey()
    if as_json:
        print_json(asdict(found))
    else:
        _show(found)


def _show(found: Devices) -> None:
    from cotenant.cli.console import console as make_console
    from cotenant.report.fitted_table import FittedTable

    console = make_console()
    cpu = found.cpu
    table = FittedTable("device", "description", title="Devices", show_edge=False)
    table.add_row("cpu", cpu.model)
    memory = f"{cpu.memory_bytes / _GIB:.1f} GiB memory" if cpu.memory_bytes else "memory unknown"
    table.add_row("", f"{len(cpu.cores)} of {cpu.installed} cores usable, {memory}")
    table.add_row("", ", ".join(f"{level} {_size(size)}" for level, size in cpu.caches.items()) or "caches unknown")
    table.add_row("", " ".join(cpu.simd) or "no SIMD flags known")
    for gpu in found.gpus:
        table.add_row(gpu.name, gpu.model)
        memory = f"{gpu.memory_bytes / _GIB:.1f} GiB memory"
        table.add_row("", f"{gpu.sms} SMs, compute capability {gpu.capability}, {memory}")
    if found.gpus:
        table.add_row("", f"driver {found.driver or 'unknown'}, CUDA {found.cuda}")
    else:
        table.add_row("cuda", found.gpu_problem)
    console.print(table)
    console.print()
    console.print(_features("Engines", found.engines))
    console.print()
    console.print(_features("Ways of sharing", found.sharing))


def _size(count: int) -> str:
    return f"{count / 1024:g} KiB" if count < 1 << 20 else f"{count / (1 << 20):g} MiB"


def _features(title: str, features: Sequence[Feature]) -> FittedTable:
    from rich.text import Text

    from cotenant.report.fitted_table import FittedTable

    table = FittedTable("", "device", "usable", "description or reason", "how to enable", title=title)
    table.title_justify, table.show_edge = "left", False
    for each in features:
        name = f"{each.name} {each.version}".strip()
        usable = Text("yes", "green") if each.usable else Text("no", "red")
        table.add_row(name, each.device, usable, each.detail, each.hint)
    return table
