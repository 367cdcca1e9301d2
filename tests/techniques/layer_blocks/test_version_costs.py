"""What units cost in their versions, from kernels that were measured under pressure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from cotenant.profiles.version_table import VersionTable
from cotenant.techniques.layer_blocks.compile.selection import KernelVersion
from cotenant.techniques.layer_blocks.measure.version_costs import version_costs

FAST = KernelVersion(1, 1, 100, (100, 150, 200))
"""One task: further cores do not help it, and it takes twice as long under pressure."""
ROBUST = KernelVersion(2, 8, 120, (120, 120, 120))
MOST = 20 * 10**9


def model(units: list[list[list[KernelVersion]]], counted: int = 10**6, most: int = MOST) -> Any:
    unit = SimpleNamespace(weight_bytes=counted, read_bytes=0, write_bytes=0)
    return SimpleNamespace(
        unit_kernels=lambda _: units,
        most_bytes_per_s=most,
        dfg_at=lambda _: SimpleNamespace(units=[unit] * len(units)),
    )


def test_a_table_has_a_version_for_each_level_and_adds_up_to_the_whole() -> None:
    layer = [FAST, ROBUST, ROBUST]
    table = version_costs(model([[layer], []]), {}, [1000, 500], {1: 3000, 2: 2000})
    assert isinstance(table, VersionTable)
    assert (table.cores, table.levels, table.versions) == (2, 3, 3)
    heavy, light = table.units
    assert heavy.by_level == (0, 1, 1)
    assert light.by_level == (0, 0, 0)
    # On one core both take what was measured; on two the first version is the robust kernel, in half its time.
    assert heavy.implementations[0].solo_ns[0] + light.implementations[0].solo_ns[0] == 3000
    assert heavy.implementations[0].solo_ns[1] + light.implementations[0].solo_ns[1] == 2000
    assert heavy.implementations[1].solo_ns[0] == 1.2 * heavy.implementations[0].solo_ns[0]
    assert heavy.implementations[1].solo_ns[1] == heavy.implementations[0].solo_ns[1]


def test_bytes_explain_the_time_under_pressure() -> None:
    table = version_costs(model([[[FAST, ROBUST, ROBUST]]], counted=100), {}, [10_000], {1: 10_000, 2: 6_000})
    assert isinstance(table, VersionTable)
    fast, robust = table.units[0].implementations
    # Beside one core that copies it has half of 20 GB/s, which is 10 bytes a ns: twice 10 us move 200 kB.
    assert fast.moved_bytes == (200_000, 200_000)
    assert robust.moved_bytes == (100, 100), "no more than the graph counts, where nothing slows it down"
    spans = table.spans()
    assert spans.block_ns(0, 1, 0, 2, 1) == 20_000
    assert spans.block_ns(0, 1, 2, 2, 1) == 12_000
    much = version_costs(model([[[ROBUST]]], counted=10**12), {}, [10_000], {1: 10_000})
    assert isinstance(much, VersionTable)
    assert much.units[0].implementations[0].moved_bytes == (200_000,), "what does not slow it down moves no more"


@pytest.mark.parametrize("layer", [[KernelVersion(1, 1, 100)], []])
def test_what_was_not_measured_under_pressure_has_no_table(layer: list[KernelVersion]) -> None:
    assert version_costs(model([[layer]] if layer else [[]]), {}, [10], {1: 10}) is UNSET
    assert version_costs(model([[[FAST]]], most=0), {}, [10], {1: 10}) is UNSET
