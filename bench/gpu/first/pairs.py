"""Two to eight models side by side as graphs, on plain streams, by priority, and in halves. Table: pairs.csv.

SECONDS bounds it. `gain` compares the same runs: their time in turn on the whole device over their time together.
Slowdowns are of the first model: time from end to end of its runs, over its time alone on the whole device.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np

from bench.gpu._models import DEFAULT
from bench.gpu._stats import plain
from bench.gpu.first._base import PRECISIONS, Script
from bench.gpu.first._device import Work
from cotenant.execute.gpu.cuda_driver import GpuError

Point = tuple[str, int, str, tuple[str, ...]]
PLAIN, PRIORITY, HALVES = "streams", "first with priority", "halves"
WAYS = (PLAIN, HALVES, PRIORITY)
ROWS = (1, 8)
COPIES = (3, 4, 6, 8)
_FEWEST = 4
_AHEAD = 8
"""Replays that wait in a stream: enough that the device is never idle, few enough that none blocks the other's host."""


class Side:
    """Captured models by model, rows and stream: each is captured once a stream."""

    def __init__(self, script: Script) -> None:
        device = self._device = script.device
        self._script = script
        self.streams = {f"plain {at}": device.stream() for at in range(max(COPIES))}
        self.streams |= {"urgent": device.stream(urgent=True)}
        try:
            self.streams |= {f"half {at}": stream for at, (_, _, stream) in enumerate(device.parts())}
        except GpuError as error:
            print(f"left out: halves, {error}")
        self.works: dict[tuple[str, int, str], Work] = {}
        self.alone: dict[tuple[str, int, str], float] = {}

    def lanes(self, how: str, count: int) -> list[str]:
        """Names of streams for so many models."""
        if how == HALVES:
            return ["half 0", "half 1"]
        return ["urgent" if how == PRIORITY else "plain 0", *(f"plain {at}" for at in range(1, count))]

    def captured(self, name: str, rows: int, stream: str) -> Work:
        key = name, rows, stream
        if key not in self.works:
            self.works[key] = self._device.capture(self._script.work(name, rows), self.streams[stream])
        return self.works[key]

    def alone_ms(self, name: str, rows: int, stream: str) -> float:
        """Time of a replay with nothing beside it."""
        key = name, rows, stream
        if key not in self.alone:
            work = self.captured(*key)
            with self._device.on(self.streams[stream]):
                self.alone[key] = self._script.timed(work, 0.1)["ms"]
        return self.alone[key]

    def measure(self, names: Sequence[str], rows: int, how: str, seconds: float) -> dict[str, Any]:
        """Gain and slowdowns of models side by side. Raises RuntimeError when too few runs overlap."""
        lanes = self.lanes(how, len(names))
        alone = [self.alone_ms(name, rows, "plain 0") for name in names]
        own = [self.alone_ms(name, rows, lane) for name, lane in zip(names, lanes, strict=True)]
        works = [self.captured(name, rows, lane) for name, lane in zip(names, lanes, strict=True)]
        ends = self._together(works, lanes, seconds)
        start, stop = max(each[0] for each in ends), min(each[-1] for each in ends)
        runs = [sum(start < end <= stop for end in each) for each in ends]
        if min(runs) < 2:
            raise RuntimeError(f"too few runs side by side: {runs}")
        gain = sum(count * ms for count, ms in zip(runs, alone, strict=True)) / (stop - start)
        p50, p99 = np.percentile(np.diff([end for end in ends[0] if start <= end <= stop]) / alone[0], [50, 99])
        figures = {"gain": plain(gain), "slowdown_p50": plain(p50), "slowdown_p99": plain(p99)}
        texts = {"alone_ms": " ".join(f"{ms:g}" for ms in alone), "own_ms": " ".join(f"{ms:g}" for ms in own)}
        return {**figures, **texts, "runs": " ".join(map(str, runs))}

    def _together(self, works: Sequence[Work], lanes: Sequence[str], seconds: float) -> list[list[float]]:
        """Ends of the runs of each in ms since a common start, each submitted by a thread of its own."""
        device, began = self._device, self._device.mark()
        device.sync()
        barrier, failed = threading.Barrier(len(works)), threading.Event()
        marks: list[list[Any]] = [[] for _ in works]
        common: list[int] = []  # how many each had when all had begun

        def submit(at: int) -> None:
            device.settle()
            with device.on(self.streams[lanes[at]]):
                barrier.wait(10.0)
                until, is_over = time.perf_counter() + seconds, False
                while not (is_over or failed.is_set()):
                    works[at]()
                    marks[at].append(device.mark())
                    if len(marks[at]) > _AHEAD:
                        marks[at][-_AHEAD].synchronize()
                    if not common and all(marks):
                        common[:] = map(len, marks)
                    beside = [len(each) - before for each, before in zip(marks, common, strict=False)]
                    is_over = time.perf_counter() > until and min(beside, default=0) >= _FEWEST

        with ThreadPoolExecutor(len(works)) as pool:
            runs = [pool.submit(submit, at) for at in range(len(works))]
            for run in runs:  # the others would wait for the runs of one that failed for ever
                run.add_done_callback(lambda done: failed.set() if done.exception() else None)
        for run in runs:
            run.result()
        device.sync()
        return [[began.elapsed_time(mark) for mark in each] for each in marks]


def points(names: Sequence[str], ways: Sequence[str], is_quick: bool) -> Iterator[Point]:
    """(precision, rows, how, models), pairs first."""
    copies = COPIES[:1] if is_quick else COPIES
    for (precision, suffix), rows in product(PRECISIONS.items(), ROWS[:1] if is_quick else ROWS):
        for pair, how in product(combinations_with_replacement(names, 2), ways):
            yield precision, rows, how, tuple(name + suffix for name in pair)
        for name, count in product(names[:2], copies):
            yield precision, rows, PLAIN, (name + suffix,) * count


def main() -> None:
    """All of them, as far as the time goes."""
    script = Script(__doc__, 135.0)
    sys.setswitchinterval(5e-5)  # a thread that waits for the interpreter's lock would leave its stream empty
    names = script.open(DEFAULT, tuple(PRECISIONS.values()))
    side = Side(script)
    ways = [how for how in WAYS if how != HALVES or "half 0" in side.streams]
    table = script.table("pairs", "precision rows how models lanes gain slowdown_p50 slowdown_p99 alone_ms own_ms runs")
    now = None
    for precision, rows, how, models in points(names, ways, script.quick):
        if now != (now := (precision, rows)):
            side.works, side.alone = {}, {}  # and their memory
        keys = {"precision": precision, "rows": rows, "how": how, "lanes": len(models), "models": "+".join(models)}
        table.point(partial(side.measure, models, rows, how, 0.05 if script.quick else 0.25), **keys)


if __name__ == "__main__":
    main()
