"""Tables of versions against the same rules written plainly, one number at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.profiles.version_table import Implementation, UnitVersions, VersionTable

CORES = 6


@st.composite
def implementations(draw: st.DrawFn) -> Implementation:
    cores = sorted(draw(st.sets(st.integers(1, CORES + 2), min_size=1, max_size=4)))
    ns = [draw(st.integers(1_000, 100_000)) for _ in cores]
    return Implementation(tuple(cores), tuple(ns), tuple(draw(st.integers(0, 400_000)) for _ in cores))


@st.composite
def tables(draw: st.DrawFn) -> VersionTable:
    levels = draw(st.integers(1, 3))
    units = []
    for _ in range(draw(st.integers(1, 3))):
        known = draw(st.lists(implementations(), min_size=1, max_size=3))
        units.append(UnitVersions(tuple(known), tuple(draw(st.integers(0, len(known) - 1)) for _ in range(levels))))
    return VersionTable(CORES, levels, draw(st.sampled_from((0, 4_000_000_000))), tuple(units))


def solo(made: Implementation, cores: int) -> float:
    points = [(0, 0.0), *((c, 1 / ns) for c, ns in zip(made.cores, made.solo_ns, strict=True))]
    for (low, slow), (high, fast) in pairwise(points):
        if low <= cores <= high:
            return 1 / (slow + (fast - slow) * (cores - low) / (high - low))
    return 1 / points[-1][1]


def moved(table: VersionTable, made: Implementation, cores: int) -> float:
    points = list(zip(made.cores, made.moved_bytes, strict=True))
    found = points[0][1] if cores <= points[0][0] else points[-1][1]
    for (low, few), (high, many) in pairwise(points):
        if low <= cores <= high:
            found = few + (many - few) * (cores - low) / (high - low)
    most = solo(made, cores) * table.bandwidth_bytes_per_s / 1e9
    return min(found, most) if table.bandwidth_bytes_per_s else found


def taken(table: VersionTable, made: Implementation, threads: int, level: int) -> float:
    alone = solo(made, threads)
    if not table.bandwidth_bytes_per_s:
        return alone
    pressure = level / (table.levels - 1) if table.levels > 1 else 0.0
    part = max(1 - pressure, threads / table.cores)
    return max(alone, moved(table, made, threads) / (table.bandwidth_bytes_per_s * part) * 1e9)


@given(tables())
@settings(max_examples=60, deadline=None)
def test_sums_and_costs_are_those_of_the_rules(table: VersionTable) -> None:
    spans, costs = table.spans(), table.costs()
    n = len(table.units)
    assert (spans.units, spans.versions, spans.levels, spans.cores) == (n, table.versions, table.levels, CORES)
    assert len(spans.ns) == spans.versions * spans.levels * CORES * (n + 1)
    assert len(spans.moved) == spans.versions * CORES * (n + 1)
    for q in range(table.versions):
        for cores in range(1, CORES + 1):
            for u, unit in enumerate(table.units):
                made = unit.implementations[unit.by_level[q]]
                threads = min(range(1, cores + 1), key=lambda c: (taken(table, made, c, q), c))
                at = (q * CORES + cores - 1) * n + u
                assert taken(table, made, costs.threads[at], q) == pytest.approx(taken(table, made, threads, q))
                assert costs.ns[at] == pytest.approx(solo(made, costs.threads[at]), abs=1)
                assert costs.moved[at] == pytest.approx(moved(table, made, costs.threads[at]), abs=1)
                assert spans.block_bytes(u, u + 1, q, cores) == costs.moved[at]
                for level in range(table.levels):
                    widths = [costs.threads[(q * CORES + c - 1) * n + u] for c in range(1, cores + 1)]
                    expected = min(taken(table, made, width, level) for width in widths)
                    assert spans.block_ns(u, u + 1, q, level, cores) == pytest.approx(expected, abs=1)


@given(tables())
@settings(max_examples=40, deadline=None)
def test_more_cores_are_not_slower_and_the_version_of_a_level_is_as_fast_as_measured_there(table: VersionTable) -> None:
    spans = table.spans()
    for q in range(table.versions):
        for level in range(table.levels):
            times = [spans.block_ns(0, spans.units, q, level, c) for c in range(1, CORES + 1)]
            assert times == sorted(times, reverse=True)
        alone = [spans.block_ns(0, spans.units, q, level, CORES) for level in range(table.levels)]
        assert alone == sorted(alone)


def test_one_implementation_is_one_version() -> None:
    made = Implementation((1,), (1000,), (0,))
    assert VersionTable(2, 3, 0, (UnitVersions((made, made), (0, 0, 0)),)).versions == 1
    assert VersionTable(2, 3, 0, (UnitVersions((made, made), (0, 0, 1)),)).versions == 3


def test_wrong_tables_are_refused() -> None:
    for cores, ns, moved_bytes in [((), (), ()), ((2, 1), (1, 1), (0, 0)), ((1,), (0,), (0,)), ((1,), (1, 2), (0,))]:
        with pytest.raises(InvalidValueError, match="implementation: "):
            Implementation(cores, ns, moved_bytes)
    made = Implementation((1,), (1000,), (0,))
    with pytest.raises(InvalidValueError, match=r"by_level of unit 0 is \(0, 1\), expected for each of 2 levels"):
        VersionTable(1, 2, 0, (UnitVersions((made,), (0, 1)),))
    with pytest.raises(InvalidValueError, match="units"):
        VersionTable(1, 2, 0, ())
    with pytest.raises(InvalidValueError, match="cores is 0"):
        VersionTable(0, 2, 0, (UnitVersions((made,), (0, 0)),))
