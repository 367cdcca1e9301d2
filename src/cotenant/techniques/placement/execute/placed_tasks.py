"""Executable tasks of a placement: units that a device runs in one call, and their dependencies. Pure.

Source: chain execution of SIR+ (SYSTOR 2022), section 6.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.errors import InvalidValueError
from cotenant.graph.dfg import Dfg


@dataclass(frozen=True, slots=True)
class PlacedTask:
    """A task of a placement: units that one device runs in one call, in order.

    `cores`: occupied cores, by their numbers in the share; the thread of the first one runs the task. The task may
    start when `dependency_count` tasks have ended; `followers`: numbers of the tasks that depend on it.
    """

    cores: range
    units: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    followers: tuple[int, ...]
    dependency_count: int


def tasks_of(dfg: Dfg, order: Sequence[int], places: Sequence[range]) -> tuple[PlacedTask, ...]:
    """Cut a graph into tasks, for units that run in this order on these cores (`places`, an entry a unit).

    1. Keep the dependencies between devices that earlier ones do not imply (`_essential`).
    2. Cut a device's sequence of units before a unit with such a dependency, and behind a unit on which one depends.

    These are the fewest cuts without additional waiting. Tasks on a common core depend on each other in order.

    Raises InvalidValueError if the order does not have each unit once, behind the units that it reads from.
    """
    count = len(dfg.units)
    if sorted(order) != list(range(count)) or len(places) != count:
        raise InvalidValueError(f"placement of {dfg.model!r}", "units", len(order), f"each of {count} units once")
    depends_on = _essential(dfg, order, places)
    ends = {before for befores in depends_on.values() for before in befores}
    members: list[list[int]] = []
    latest: dict[range, int] = {}
    """Number of the last task of each device."""
    task_of = [-1] * count
    chain: set[tuple[int, int]] = set()
    for unit in order:
        device = places[unit]
        at = latest.get(device)
        if at is None or depends_on[unit] or members[at][-1] in ends:
            members.append([])
            if at is not None:
                chain.add((at, len(members) - 1))
            at = latest[device] = len(members) - 1
        members[at].append(unit)
        task_of[unit] = at
    edges = sorted(chain | {(task_of[p], task_of[u]) for u, befores in depends_on.items() for p in befores})
    read_in = {name: {task_of[unit] for unit in readers} for name, (_, readers) in dfg.crossing().items()}
    for tensor in dfg.outputs:
        read_in.setdefault(tensor.name, set()).add(-1)
    made: list[PlacedTask] = []
    for at, units in enumerate(members):
        own = dict.fromkeys(name for unit in units for name in dfg.units[unit].outputs)
        inputs = dict.fromkeys(name for unit in units for name in dfg.units[unit].inputs if name not in own)
        outputs = tuple(name for name in own if read_in.get(name, {at}) != {at})
        followers = tuple(after for before, after in edges if before == at)
        dependency_count = sum(after == at for _, after in edges)
        made.append(PlacedTask(places[units[0]], tuple(units), tuple(inputs), outputs, followers, dependency_count))
    return tuple(made)


def _essential(dfg: Dfg, order: Sequence[int], places: Sequence[range]) -> dict[int, list[int]]:
    """Dependencies of each unit on units of other devices, without those implied by others (by vector clocks).

    The clock of a unit has, by device, the rank of the device's last unit that has ended when the unit ends.
    """
    edges = dfg.crossing()
    rank = {unit: at for at, unit in enumerate(order)}
    clocks: dict[int, dict[range, int]] = {}
    """Vector clocks by unit."""
    on_core: dict[int, int] = {}
    on_device: dict[range, int] = {}
    found: dict[int, list[int]] = {}
    for unit in order:
        device = places[unit]
        reads = {edges[name][0] for name in dfg.units[unit].inputs if name in edges}
        early = next((each for each in reads if each not in clocks), None)
        if early is not None:
            raise InvalidValueError(
                f"placement of {dfg.model!r}", "order", (early, unit), "units behind what they read"
            )
        clock = dict(clocks[on_device[device]]) if device in on_device else {}
        befores = reads | {on_core[core] for core in device if core in on_core}
        found[unit] = []
        for before in sorted(befores, key=rank.__getitem__, reverse=True):
            other = places[before]
            if other != device and clock.get(other, -1) < rank[before]:
                found[unit].append(before)
                for each, far in clocks[before].items():
                    clock[each] = max(far, clock.get(each, -1))
        clock[device] = rank[unit]
        clocks[unit] = clock
        on_device[device] = unit
        on_core.update(dict.fromkeys(device, unit))
    return found
