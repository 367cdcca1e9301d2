"""Gantt charts, instants and counters as a Chrome trace, the JSON that https://ui.perfetto.dev opens (Open trace file).

Lanes are named `process/thread` as the viewer groups them, e.g. `tenants/resnet50`. Bars of one lane that overlap in
time are drawn below each other.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.files import write_whole
from cotenant.gantt import Bar


@dataclass(frozen=True, slots=True)
class Instant:
    """An event at one time on a track."""

    track: str
    name: str
    time_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counter:
    """Values from this time on, drawn stacked, such as queue lengths by tenant."""

    track: str
    time_ns: int
    values: Mapping[str, float]


def write_perfetto(
    path: Path, bars: Iterable[Bar], instants: Iterable[Instant] = (), counters: Iterable[Counter] = ()
) -> None:
    """Write the trace. Tracks are in the order of their first use, events in order of time.

    The format has times in microseconds; they have three decimals.
    """
    lanes = _Lanes()
    events: list[tuple[int, dict[str, Any]]] = []
    for bar, (pid, tid) in lanes.place(list(bars)):
        event = {"ph": "X", "name": bar.label, "pid": pid, "tid": tid, "ts": bar.start_ns / 1000}
        events.append((bar.start_ns, event | {"dur": (bar.end_ns - bar.start_ns) / 1000, "args": dict(bar.args)}))
    for instant in instants:
        pid, tid = lanes.first(instant.track)
        event = {"ph": "i", "s": "t", "name": instant.name, "pid": pid, "tid": tid, "ts": instant.time_ns / 1000}
        events.append((instant.time_ns, event | {"args": dict(instant.args)}))
    for counter in counters:
        process, _, name = counter.track.rpartition("/")
        pid = lanes.process(process or counter.track)
        event = {"ph": "C", "name": name, "pid": pid, "ts": counter.time_ns / 1000, "args": dict(counter.values)}
        events.append((counter.time_ns, event))
    events.sort(key=lambda timed: timed[0])
    lines = [json.dumps(line, separators=(",", ":")) for line in (*lanes.names(), *(event for _, event in events))]
    body = ",\n".join(lines)
    write_whole(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{body}\n]}}\n'.encode())


class _Lanes:
    """Numbers of processes and threads; overlapping bars of a track get separate threads."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, int], tuple[int, int]] = {}

    def process(self, name: str) -> int:
        return self._processes.setdefault(name, len(self._processes) + 1)

    def first(self, track: str) -> tuple[int, int]:
        return self._thread(track, 0)

    def place(self, bars: Sequence[Bar]) -> Iterator[tuple[Bar, tuple[int, int]]]:
        tracks: dict[str, list[Bar]] = {}
        for bar in bars:
            tracks.setdefault(bar.lane, []).append(bar)
        for track, held in tracks.items():
            used = 0
            free: list[int] = []
            busy: list[tuple[int, int]] = []
            for bar in sorted(held, key=lambda bar: (bar.start_ns, bar.end_ns)):
                while busy and busy[0][0] <= bar.start_ns:
                    heapq.heappush(free, heapq.heappop(busy)[1])
                if free:
                    lane = heapq.heappop(free)
                else:
                    lane, used = used, used + 1
                heapq.heappush(busy, (bar.end_ns, lane))
                yield bar, self._thread(track, lane)

    def _thread(self, track: str, lane: int) -> tuple[int, int]:
        if (track, lane) not in self._threads:
            process, _, _ = track.partition("/")
            self._threads[track, lane] = (self.process(process), len(self._threads) + 1)
        return self._threads[track, lane]

    def names(self) -> Iterator[dict[str, Any]]:
        """Yield the metadata events that name processes and threads and keep them in order."""
        for name, pid in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        order = list(dict.fromkeys(track for track, _ in self._threads))
        for (track, lane), (pid, tid) in self._threads.items():
            process, _, thread = track.partition("/")
            name = (thread or process) + (f" ({lane + 1})" if lane else "")
            rank = order.index(track) * 10_000 + lane
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": rank}}
