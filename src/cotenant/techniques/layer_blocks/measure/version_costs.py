"""Costs of the units of a compiled model in each version, for its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType

from cotenant.profiles.version_table import Implementation, UnitVersions, VersionTable
from cotenant.techniques.layer_blocks.compile.selection import KernelVersion, pick
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel

_SLOWED = 1.02
"""Ratio of the time under pressure to that alone, up to which a kernel counts as unaffected."""
_NS_PER_S = 1_000_000_000


def version_costs(
    model: CompiledModel, shapes: Mapping[str, Sequence[int]], unit_ns: Sequence[int], whole_ns: Mapping[int, int]
) -> VersionTable | UnsetType:
    """The version table of a model at some input shapes, if its kernels were measured under pressure; else unset.

    `unit_ns` are times of the units on one core, `whole_ns` those of the whole model by number of cores; units are
    scaled to them. In another version, or on more cores, a unit is scaled by its kernels' tasks and times. A unit on
    onnxruntime is scaled as the whole model.

    The traffic of a unit is the bytes that explain its time under the most pressure, at its cores' share of the
    bandwidth. If that does not slow it down, it is the count of its graph, up to these bytes.
    """
    by_unit = model.unit_kernels(shapes)
    levels = max((len(each.level_ns) for kernels in by_unit for versions in kernels for each in versions), default=0)
    if not levels or not model.most_bytes_per_s:
        return UNSET
    cores = sorted(whole_ns)
    counted = [unit.weight_bytes + unit.read_bytes + unit.write_bytes for unit in model.dfg_at(shapes).units]
    per_core = model.most_bytes_per_s / cores[-1] / _NS_PER_S
    found: list[tuple[list[list[float]], list[float], list[int]]] = []
    for unit, kernels in enumerate(by_unit):
        chosen = [tuple(pick(versions, level, 1) for versions in kernels) for level in range(levels)]
        distinct = list(dict.fromkeys(chosen))
        times, moved = [], []
        alone = sum(versions[0].cpu_ns for versions in kernels)
        for each in distinct:
            times.append([_on(unit_ns[unit], kernels, each, alone, count, whole_ns) for count in cores])
            slowdown = _slowdown(each)
            most = times[-1][0] * slowdown * per_core
            moved.append(most if slowdown > _SLOWED else min(most, counted[unit]))
        found.append((times, moved, [distinct.index(each) for each in chosen]))
    scales = [
        whole_ns[count] / sum(times[by_level[0]][at] for times, _, by_level in found) for at, count in enumerate(cores)
    ]
    units = tuple(
        UnitVersions(
            tuple(
                Implementation(
                    tuple(cores),
                    tuple(max(1, round(ns * scale)) for ns, scale in zip(taken, scales, strict=True)),
                    (round(bytes_),) * len(cores),
                )
                for taken, bytes_ in zip(times, moved, strict=True)
            ),
            tuple(by_level),
        )
        for times, moved, by_level in found
    )
    return VersionTable(cores[-1], levels, model.most_bytes_per_s, units)


def _on(
    unit_ns: int,
    kernels: Sequence[Sequence[KernelVersion]],
    chosen: Sequence[KernelVersion],
    alone_ns: int,
    cores: int,
    whole_ns: Mapping[int, int],
) -> float:
    """Time of a unit with these kernels on some cores; the first version of a layer is the fastest one there."""
    if not kernels:
        return unit_ns * whole_ns[cores] / whole_ns[min(whole_ns)]
    taken = sum(
        (pick(versions, 0, cores) if each == versions[0] else each).ns_on(cores)
        for versions, each in zip(kernels, chosen, strict=True)
    )
    return unit_ns * taken / max(1, alone_ns)


def _slowdown(chosen: Sequence[KernelVersion]) -> float:
    """Slowdown at the highest level of pressure, on one core; 1 if it was not measured."""
    alone = sum(each.level_ns[0] for each in chosen if each.level_ns)
    return sum(each.level_ns[-1] for each in chosen if each.level_ns) / alone if alone else 1.0
