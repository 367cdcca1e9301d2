"""Time of models over rows, SMs and precision, as graphs captured in shares of so many SMs. Table: sweep.csv.

SECONDS bounds it. The corners of the grid come first, then what lies between; `how` is eager in the whole device alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.gpu.first._base import NAMES, PRECISIONS, Script
from bench.gpu.first._device import Part
from cotenant.execute.gpu.cuda_driver import GpuError
from cotenant.work import Share

GROUPS = (0, 8, 4, 1, 2, 12, 6, 3, 10, 16)
"""Ends of shares that begin at the first group, the most telling ones first; 0 is the whole device."""
_CORNERS = 4
ROWS = (8, 1, 32, 4, 16, 2)
_FIRST_ROWS = 2


def points(script: Script, parts: list[Part], names: tuple[str, ...]) -> Iterator[tuple[int, str, str, Part]]:
    """(rows, precision, model, share), what tells most first."""
    rows = ROWS[:1] if script.quick else ROWS
    rounds = [(rows[:_FIRST_ROWS], parts[:_CORNERS]), (rows[:_FIRST_ROWS], parts[_CORNERS:])]
    rounds += [(rows[_FIRST_ROWS:], parts[:_CORNERS]), (rows[_FIRST_ROWS:], parts[_CORNERS:])]
    for some, shares in rounds:
        for each in some:
            for precision in PRECISIONS:
                for name in names:
                    for part in shares:
                        yield each, precision, name, part


def measure(script: Script, name: str, rows: int, stream: Any, how: str) -> dict[str, Any]:
    """One model in one share."""
    work = script.work(name, rows)
    if how == "graph":
        work = script.device.capture(work, stream)
    with script.device.on(stream):
        return script.timed(work, 0.15)


def main() -> None:
    """The grid, as far as the time goes."""
    script = Script(__doc__, 225.0)
    names = script.open(NAMES, tuple(PRECISIONS.values()))
    try:
        parts = script.device.parts([(0, end) for end in (GROUPS if script.device.is_gpu else GROUPS[:2])])
    except GpuError as error:
        print(f"left out: shares, {error}")
        parts = [(Share((0,), script.device.name), 0, script.device.stream())]
    table = script.table("sweep", "model precision rows how asked_sms granted_sms ms host_us runs")
    for rows, precision, name, (share, granted, stream) in points(script, parts, names):
        is_whole = share == parts[0][0]
        for how in ("graph", "eager") if is_whole else ("graph",):
            keys = {"model": name, "precision": precision, "rows": rows, "how": how}
            keys |= {"asked_sms": share.size, "granted_sms": granted}
            table.point(partial(measure, script, name + PRECISIONS[precision], rows, stream, how), **keys)


if __name__ == "__main__":
    main()
