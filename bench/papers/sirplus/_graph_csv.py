"""Task graphs of others: tables of tasks and edges, and options for links and memory."""

from __future__ import annotations

import csv
import heapq
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench._registry import BenchError
from cotenant.techniques.placement.plan.task_graph import DeviceLink, GraphTask, TaskDevice, TaskGraph
from cotenant.techniques.placement.task_profile import UnitTensor

TASK_COLUMNS = ("task", "device", "ms")
EDGE_COLUMNS = ("from", "to", "bytes")
_MEMORY_COLUMNS = ("memory", "memory_bytes", "bytes")
_MOST_MS = 3.6e6
_MOST_BYTES = 1 << 50
_BYTES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "": 1}
_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
Rows = Iterator[tuple[str, dict[str, str]]]


def read_graph(graph: Path, edges: Path | None, links: Sequence[str] = (), memory: Sequence[str] = ()) -> TaskGraph:
    """The task graph that tables and options describe. Links hold in both directions, unless both are given.

    Raises BenchError, which names file, line and the expected value.
    """
    times, memories = _tasks(graph)
    devices = list(dict.fromkeys(device for row in times.values() for device in row))
    tensors = _tensors(edges, graph, times) if edges is not None else []
    order = _topological(list(times), tensors)
    tasks = tuple(GraphTask(name, times[name], {}, memories[name]) for name in order)
    ways: dict[tuple[str, str], DeviceLink] = {}
    for text in links:
        link = _link(text, devices)
        if (link.source, link.target) in ways:
            raise BenchError(f"--link {text!r}: a link {link.source}:{link.target} was given before, expected one")
        ways[link.source, link.target] = link
    for (source, target), link in list(ways.items()):
        ways.setdefault((target, source), DeviceLink(target, source, link.bytes_per_s, link.latency_ns))
    limits: dict[str, int] = {}
    for text in memory:
        device, limit = _limit(text, devices)
        if device in limits:
            raise BenchError(f"--memory {text!r}: a limit of {device!r} was given before, expected one")
        limits[device] = limit
    at = {name: number for number, name in enumerate(order)}
    made = tuple(
        UnitTensor(name, at[producer], tuple(at[reader] for reader in readers), size)
        for name, producer, readers, size, _ in tensors
    )
    return TaskGraph(tuple(map(TaskDevice, devices)), tasks, made, tuple(ways.values()), limits)


def _rows(path: Path, columns: Sequence[str]) -> Rows:
    """Where each row stands, and its fields. Blank lines are skipped."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            head = [field.strip() for field in next(reader, [])]
            missing = [column for column in columns if column not in head]
            if missing or len(set(head)) != len(head):
                raise BenchError(
                    f"{path}, line 1: the columns are {', '.join(head) or 'missing'}, expected {', '.join(columns)}, "
                    "each once"
                )
            for fields in reader:
                where = f"{path}, line {reader.line_num}"
                if not any(field.strip() for field in fields):
                    continue
                if len(fields) != len(head):
                    raise BenchError(f"{where}: has {len(fields)} fields, expected {len(head)}: {', '.join(head)}")
                yield where, dict(zip(head, (field.strip() for field in fields), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchError(f"{path}: cannot be read ({reason}); expected a table with {', '.join(columns)}") from None


def _tasks(path: Path) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """Nanoseconds and bytes by task and device."""
    times: dict[str, dict[str, int]] = {}
    memories: dict[str, dict[str, int]] = {}
    for where, row in _rows(path, TASK_COLUMNS):
        task, device = _name(where, row, "task"), _name(where, row, "device")
        if device in times.setdefault(task, {}):
            raise BenchError(f"{where}: task {task!r} on {device!r} was given before, expected one row for each device")
        ms = _number(where, row, "ms", _MOST_MS)
        times[task][device] = round(ms * 1e6)
        column = next((each for each in _MEMORY_COLUMNS if each in row), "")
        memories.setdefault(task, {})[device] = _whole(where, row, column) if column and row[column] else 0
    if not times:
        raise BenchError(f"{path}: has no rows, expected at least one task")
    return times, memories


def _tensors(
    path: Path, graph: Path, tasks: dict[str, dict[str, int]]
) -> list[tuple[str, str, list[str], int, list[str]]]:
    """Name, producer, readers, size, and where each reader stands. Without a name every edge is a tensor of its own."""
    named: dict[tuple[str, str], tuple[str, str, list[str], int, list[str]]] = {}
    for number, (where, row) in enumerate(_rows(path, EDGE_COLUMNS)):
        ends = [_name(where, row, "from"), _name(where, row, "to")]
        for end in ends:
            if end not in tasks:
                raise BenchError(f"{where}: there is no task {end!r}, expected one of {graph}")
        if ends[0] == ends[1]:
            raise BenchError(f"{where}: task {ends[0]!r} reads its own output, expected two different tasks")
        size = _whole(where, row, "bytes")
        name = row.get("tensor", "")
        key = (ends[0], f"tensor {name}" if name else f"edge {number}")
        tensor = named.setdefault(key, (f"{ends[0]}/{name or number}", ends[0], [], size, []))
        if tensor[3] != size:
            raise BenchError(f"{where}: tensor {name!r} of {ends[0]!r} has {size} bytes, expected {tensor[3]}")
        if ends[1] in tensor[2]:
            raise BenchError(f"{where}: {ends[1]!r} reads tensor {name!r} of {ends[0]!r} twice, expected one edge")
        tensor[2].append(ends[1])
        tensor[4].append(where)
    return list(named.values())


def _topological(names: list[str], tensors: list[tuple[str, str, list[str], int, list[str]]]) -> list[str]:
    """Tasks in an order that follows the edges, otherwise that of the file."""
    number = {name: at for at, name in enumerate(names)}
    missing = dict.fromkeys(names, 0)
    after: dict[str, list[str]] = {name: [] for name in names}
    for _, producer, readers, *_ in tensors:
        for reader in readers:
            missing[reader] += 1
            after[producer].append(reader)
    ready = [at for name, at in number.items() if missing[name] == 0]
    order = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for reader in after[name]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, number[reader])
    if len(order) < len(names):
        left = {name for name in names if missing[name] > 0}
        # Tasks behind a circle are left as well: those that lead into nothing that is left are no part of one.
        while leaves := {name for name in left if not left & set(after[name])}:
            left -= leaves
        where = next(
            place
            for _, producer, readers, _, places in tensors
            if producer in left
            for reader, place in zip(readers, places, strict=True)
            if reader in left
        )
        raise BenchError(f"{where}: this edge is part of a circle of tasks, expected a graph without one")
    return order


def _link(text: str, devices: Sequence[str]) -> DeviceLink:
    wanted = "A:B=12GB/s,10us"
    ends, _, figures = text.rpartition("=")
    pairs = [(ends[:at], ends[at + 1 :]) for at, letter in enumerate(ends) if letter == ":"]
    known = [pair for pair in pairs if pair[0] in devices and pair[1] in devices and pair[0] != pair[1]]
    if len(known) != 1:
        raise BenchError(f"--link {text!r}: expected {wanted}, with two different devices of {', '.join(devices)}")
    rate = re.fullmatch(_NUMBER + r"\s*([kKMGT]?i?B)/s(?:\s*,\s*" + _NUMBER + r"\s*(ns|us|µs|ms|s))?", figures.strip())
    if rate is None or rate[2] not in _BYTES or float(rate[1]) <= 0:
        raise BenchError(f"--link {text!r}: expected {wanted}, a positive rate and a latency in ns, us, ms or s")
    bytes_per_s = float(rate[1]) * _BYTES[rate[2]]
    latency_ns = float(rate[3]) * _NS[rate[4]] if rate[3] else 0.0
    if not (1.0 <= bytes_per_s < 1e18 and latency_ns <= _MOST_MS * 1e6):
        raise BenchError(f"--link {text!r}: expected a rate from 1 B/s and a latency up to an hour")
    return DeviceLink(*known[0], bytes_per_s, round(latency_ns))


def _limit(text: str, devices: Sequence[str]) -> tuple[str, int]:
    device, _, figure = text.rpartition("=")
    if device not in devices:
        raise BenchError(f"--memory {text!r}: expected DEVICE=BYTES with a device of {', '.join(devices)}")
    found = re.fullmatch(_NUMBER + r"\s*([kKMGT]?i?B|)", figure.strip())
    if found is None or found[2] not in _BYTES or float(found[1]) * _BYTES[found[2]] > _MOST_BYTES:
        raise BenchError(f"--memory {text!r}: expected bytes from 0 to 2**50, such as 8000000000 or 8GB")
    return device, int(float(found[1]) * _BYTES[found[2]])


def _name(where: str, row: dict[str, str], column: str) -> str:
    if not row[column]:
        raise BenchError(f"{where}: {column} is empty, expected a name")
    return row[column]


def _number(where: str, row: dict[str, str], column: str, most: float) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise BenchError(f"{where}: {column} is {row[column]!r}, expected a number from 0 to {most:g}")
    return value


def _whole(where: str, row: dict[str, str], column: str) -> int:
    value = _number(where, row, column, _MOST_BYTES)
    if value != int(value):
        raise BenchError(f"{where}: {column} is {row[column]!r}, expected a whole number of bytes")
    return int(value)
