"""A placement cut into pieces: what each device runs in one call, and what waits for what. Pure.

Source: the concurrent executor of SIR+ (SYSTOR 2022), section 4; pieces instead of single tasks are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.errors import InvalidValueError
from cotenant.graph.dfg import Dfg


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """Units that one device runs in one call, in order.

    `cores` are those that it occupies, by their numbers within the share; the thread of the first one drives it.
    It may start when `waits` pieces have ended; `followers` are the pieces that wait for it, by number.
    """

    cores: range
    units: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    followers: tuple[int, ...]
    waits: int


def pieces_of(dfg: Dfg, order: Sequence[int], places: Sequence[range]) -> tuple[PlacedPiece, ...]:
    """Cut a graph whose units run in this order, each on these cores; `places` has an entry a unit.

    Every core runs its units in that order. A device's units in a row stay together unless one of them has to wait for
    another device, or another device for it, and no earlier wait sees to that already: the fewest cuts with which
    nobody waits for longer than he must. Pieces that share a core are in a row by what they wait for.

    Raises InvalidValueError where the order does not have each unit once, behind the units that it reads from.
    """
    count = len(dfg.units)
    if sorted(order) != list(range(count)) or len(places) != count:
        raise InvalidValueError(f"placement of {dfg.model!r}", "units", len(order), f"each of {count} units once")
    waits_for = _essential(dfg, order, places)
    ends = {before for befores in waits_for.values() for before in befores}
    members: list[list[int]] = []
    latest: dict[range, int] = {}
    """The last piece of each device."""
    piece_of = [-1] * count
    chain: set[tuple[int, int]] = set()
    for unit in order:
        device = places[unit]
        at = latest.get(device)
        if at is None or waits_for[unit] or members[at][-1] in ends:
            members.append([])
            if at is not None:
                chain.add((at, len(members) - 1))
            at = latest[device] = len(members) - 1
        members[at].append(unit)
        piece_of[unit] = at
    edges = sorted(chain | {(piece_of[p], piece_of[u]) for u, befores in waits_for.items() for p in befores})
    read_in = {name: {piece_of[unit] for unit in readers} for name, (_, readers) in dfg.crossing().items()}
    for tensor in dfg.outputs:
        read_in.setdefault(tensor.name, set()).add(-1)
    made: list[PlacedPiece] = []
    for at, units in enumerate(members):
        own = dict.fromkeys(name for unit in units for name in dfg.units[unit].outputs)
        inputs = dict.fromkeys(name for unit in units for name in dfg.units[unit].inputs if name not in own)
        outputs = tuple(name for name in own if read_in.get(name, {at}) != {at})
        followers = tuple(after for before, after in edges if before == at)
        waits = sum(after == at for _, after in edges)
        made.append(PlacedPiece(places[units[0]], tuple(units), tuple(inputs), outputs, followers, waits))
    return tuple(made)


def _essential(dfg: Dfg, order: Sequence[int], places: Sequence[range]) -> dict[int, list[int]]:
    """By unit the units of other devices that it has to wait for, without those that others of its waits imply.

    What is implied is known by vector clocks: how far each device must have come when a unit starts.
    """
    edges = dfg.crossing()
    rank = {unit: at for at, unit in enumerate(order)}
    clocks: dict[int, dict[range, int]] = {}
    """By unit the rank of the last unit of each device that has ended when it ends."""
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
