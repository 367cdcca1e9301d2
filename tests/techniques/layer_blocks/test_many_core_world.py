"""The world of many cores: its rules against linear programs, and what it does against fine time steps and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cotenant.core.actions import Launch
from cotenant.errors import InvalidValueError
from cotenant.profiles.version_table import Implementation, UnitVersions, VersionTable
from cotenant.techniques.layer_blocks.policy.block_basis import BlockBasis
from cotenant.techniques.layer_blocks.world.many_core import (
    MEAN_CONFLICT_NS,
    MEDIAN_CONFLICT_NS,
    ManyCore,
    ManyCoreWorld,
)
from cotenant.techniques.layer_blocks.world.many_core_rules import (
    FULL,
    SLICE_BYTES,
    conflict_at,
    moved_bytes,
    next_span_ns,
    set_rates,
    slices_of,
)
from cotenant.work import Share, Work

US = 1000
GB = 1_000_000_000
CORES = 16


# --- rules ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 10**7), st.integers(0, 10**8), st.integers(1, 16)), min_size=1, max_size=8),
    st.floats(1.0, 200.0),
)
@settings(max_examples=100, deadline=None)
def test_no_more_is_drawn_than_there_is_and_nobody_waits_for_nothing(
    units: list[tuple[int, int, int]], bandwidth: float
) -> None:
    ns, moved, threads = zip(*units, strict=True)
    count = len(units)
    rate = [0] * count
    set_rates(count, ns, moved, threads, bandwidth, [0.0] * count, rate)
    drawn = sum(moved[i] / ns[i] * rate[i] / FULL for i in range(count))
    part = sum(moved[i] / ns[i] for i in range(count)) / FULL  # speeds are whole parts of FULL
    assert drawn <= bandwidth * (1 + 1e-6) + part
    if any(each < FULL for each in rate):
        assert drawn == pytest.approx(bandwidth, rel=1e-6, abs=part)
    left = [each * FULL for each in ns]
    assert next_span_ns(count, left, rate) == min(-(-a // b) for a, b in zip(left, rate, strict=True))
    assert next_span_ns(0, [], []) == -1


def test_what_the_axes_move() -> None:
    weights, inputs, outputs = 4 << 20, 1 << 20, 2 << 20
    for slices in (1, 2, 4, 16):
        assert moved_bytes(weights, inputs, outputs, slices, 1) == weights + slices * inputs + outputs
        assert moved_bytes(weights, inputs, outputs, slices, 0) == inputs + slices * weights + outputs
    assert moved_bytes(5 * SLICE_BYTES, 10, 0, 2, 1) == 5 * SLICE_BYTES + 2 * 3 * 10  # each keeps 2.5 slices: 3 passes
    assert [slices_of(cores) for cores in (1, 4, 5, 16, 64)] == [1, 1, 2, 4, 16]


# --- the world ------------------------------------------------------------------------------------------------------


def table(*units: tuple[int, int], bandwidth: int = 10 * GB, robust: Sequence[tuple[int, int]] = ()) -> VersionTable:
    """Units that take ns on one core, exactly c times less on c, and move bytes; in two versions with `robust`."""

    def made(ns: int, moved: int) -> Implementation:
        counts = (1, 2, 4, 8, 16)
        return Implementation(counts, tuple(ns // count for count in counts), (moved,) * len(counts))

    known = [
        UnitVersions((made(*first), made(*other)), (0, 1)) for first, other in zip(units, robust or units, strict=True)
    ]
    return VersionTable(CORES, 2, bandwidth, tuple(known))


def launch(number: int, units: tuple[int, int], cores: Sequence[int], **more: object) -> Launch:
    made = Launch(number, number, (number,), Work("a", 0, 1, *units), True, Share(tuple(cores)), 1)
    return structs.replace(made, **more)


def played(world: ManyCoreWorld, starts: Sequence[tuple[int, Launch]]) -> dict[int, int]:
    """Starts in order of time, ends that come before first."""
    ends: dict[int, int] = {}

    def drain(until: float) -> None:
        while (at := world.next_ns()) is not None and at <= until:
            event = world.pop()
            if not event.expanded:
                ends[event.launch] = at

    for at, each in starts:
        drain(at)
        world.start(each, at)
    drain(math.inf)
    return ends


def test_alone_each_unit_takes_what_was_measured_and_beside_others_its_part_of_the_bandwidth() -> None:
    quiet, loud = (100 * US, 0), (100 * US, 800_000)  # 8 bytes a ns alone on one core, of 10
    world = ManyCoreWorld({"a": table(quiet, loud)}, ManyCore(10 * GB))
    assert played(world, [(5, launch(0, (0, 2), (0,)))]) == {0: 5 + 200 * US}
    # from 100 us on two draw 16 of 10 bytes a ns: 160 us each
    world = ManyCoreWorld({"a": table(quiet, loud)}, ManyCore(10 * GB))
    assert played(world, [(0, launch(0, (0, 2), (0,))), (0, launch(1, (0, 2), (1,)))]) == {0: 260 * US, 1: 260 * US}
    # on two cores it draws all 10 bytes a ns alone, so it moves 500,000; beside one on one core it gets two thirds
    world = ManyCoreWorld({"a": table(loud)}, ManyCore(10 * GB))
    ends = played(world, [(0, launch(0, (0, 1), (0,))), (0, launch(1, (0, 1), (1, 2)))])
    assert ends[1] == pytest.approx(500_000 / (10 * 2 / 3), abs=2)
    assert ends[0] == pytest.approx(ends[1] + (800_000 - ends[1] * 10 / 3) / 8, abs=2)


def test_a_robust_version_is_slower_alone_and_faster_beside_others() -> None:
    known = {"a": table((100 * US, 900_000), robust=[(120 * US, 200_000)])}

    def end(version: int, beside: int) -> int:
        work = Work("a", 0, 1, 0, 1, version)
        some = [(0, launch(number, (0, 1), (number,), work=work)) for number in range(beside)]
        return max(played(ManyCoreWorld(known, ManyCore(10 * GB)), some).values())

    assert (end(0, 1), end(1, 1)) == (100 * US, 120 * US)
    assert end(0, 4) == pytest.approx(360 * US, abs=2)
    assert end(1, 4) == 120 * US


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_ends_are_those_of_fine_time_steps_and_every_byte_is_moved(data: st.DataObject) -> None:
    units = data.draw(st.lists(st.tuples(st.integers(2, 40), st.integers(0, 300)), min_size=1, max_size=3))
    known = table(*[(ns * 1600, moved * 1600) for ns, moved in units])
    count = data.draw(st.integers(1, 3))
    starts = sorted(data.draw(st.lists(st.integers(0, 50_000), min_size=count, max_size=count)))
    widths = [data.draw(st.sampled_from((1, 2, 4))) for _ in starts]
    some = [
        (at, launch(number, (0, len(units)), range(4 * number, 4 * number + width)))
        for number, (at, width) in enumerate(zip(starts, widths, strict=True))
    ]
    ends = played(ManyCoreWorld({"a": known}, ManyCore(10 * GB)), some)
    expected = _stepped(known, starts, widths, 10.0)
    for number in range(count):
        assert ends[number] == pytest.approx(expected[number], rel=0.02, abs=1000)


def _stepped(known: VersionTable, starts: Sequence[int], widths: Sequence[int], bandwidth: float) -> list[float]:
    """By steps of 150 ns."""
    costs = known.costs()
    state = [(0, 0.0) for _ in starts]
    ends = [0.0] * len(starts)
    now, step = 0.0, 150.0
    while not all(ends):
        runs = [i for i in range(len(starts)) if starts[i] <= now and not ends[i]]
        at = {i: (widths[i] - 1) * costs.units + state[i][0] for i in runs}
        demand = [costs.moved[at[i]] / costs.ns[at[i]] for i in runs]
        parts = demand if sum(demand) <= bandwidth else _filled(demand, [costs.threads[at[i]] for i in runs], bandwidth)
        for i, asked, got in zip(runs, demand, parts, strict=True):
            unit, done = state[i]
            done += step / costs.ns[at[i]] * (got / asked if asked else 1.0)
            if done >= 1.0:
                unit, done = unit + 1, 0.0
                if unit == costs.units:
                    ends[i] = now + step
            state[i] = unit, done
        now += step
    return ends


def _filled(demand: Sequence[float], cores: Sequence[int], capacity: float) -> list[float]:
    """Max-min fair parts by raising the level bit by bit."""
    low, high = 0.0, capacity
    for _ in range(60):
        level = (low + high) / 2
        if sum(min(d, level * c) for d, c in zip(demand, cores, strict=True)) > capacity:
            high = level
        else:
            low = level
    return [min(d, low * c) for d, c in zip(demand, cores, strict=True)]


def test_a_launch_expands_at_its_next_stop_and_says_so() -> None:
    known = {"a": table(*[(160 * US, 0)] * 4)}
    world = ManyCoreWorld(known, ManyCore(10 * GB))
    world.start(launch(7, (0, 4), (0,), stops=(2, 3)), 0)
    world.expand(7, Share((0, 1, 2, 3)), 10 * US)
    assert (world.next_ns(), world.pop()) == (320 * US, (7, None, True))  # unit 1 is no stop
    assert (world.next_ns(), world.pop()) == (400 * US, (7, None, False))
    world.start(launch(8, (0, 4), (0,), stops=(1,)), 400 * US)
    assert world.next_ns() == (400 + 640) * US
    world.expand(8, Share((0, 1)), 600 * US)  # past its only stop: it stays as it is
    assert (world.next_ns(), world.pop()) == (1040 * US, (8, None, False))


def test_expansion_that_is_asked_for_while_another_one_slows_it_down_comes_later() -> None:
    known = {"a": table(*[(160 * US, 1_280_000)] * 2)}
    world = ManyCoreWorld(known, ManyCore(10 * GB))
    world.start(launch(0, (0, 2), (0,), stops=(1,)), 0)
    world.expand(0, Share((0, 1)), 0)
    assert world.next_ns() == 160 * US
    world.start(launch(1, (0, 1), (4,)), 0)
    assert (world.next_ns(), world.pop()) == (256 * US, (0, None, True))
    assert world.pop().launch == 1


def test_too_few_cores_cost_one_conflict_whose_law_is_the_papers() -> None:
    machine = ManyCore(10 * GB, seed=3)
    drawn = machine.conflicts_ns()
    assert mean(drawn) == pytest.approx(MEAN_CONFLICT_NS, rel=0.1)
    assert median(drawn) == pytest.approx(MEDIAN_CONFLICT_NS, rel=0.1)
    known = {"a": table((160 * US, 0), (160 * US, 0))}
    short = played(ManyCoreWorld(known, machine), [(0, launch(5, (0, 2), (0,), basis=BlockBasis(0, wanted=2)))])
    assert short == {5: 320 * US + drawn[conflict_at(5, 0, len(drawn))]}
    assert played(ManyCoreWorld(known, machine), [(0, launch(5, (0, 2), (0,), basis=BlockBasis(0, wanted=1)))]) == {
        5: 320 * US
    }
    seen = {conflict_at(query, unit, len(drawn)) for query in range(200) for unit in range(50)}
    assert len(seen) > 0.8 * len(drawn)


def test_equal_starts_end_in_the_order_of_their_numbers_and_wrong_launches_are_refused() -> None:
    world = ManyCoreWorld({"a": table((160 * US, 0))}, ManyCore(10 * GB))
    for number in (3, 1, 2):
        world.start(launch(number, (0, 1), (number,)), 0)
    assert [world.pop().launch for _ in range(3)] == [1, 2, 3]
    with pytest.raises(InvalidValueError, match="one that ends"):
        world.pop()
    with pytest.raises(InvalidValueError, match="tenant is 'b', expected one of a"):
        world.start(launch(4, (0, 1), (0,), work=Work("b", 0, 1, 0, 1)), 0)
    with pytest.raises(InvalidValueError, match="at most 1 units"):
        world.start(launch(4, (0, 2), (0,)), 0)
    with pytest.raises(InvalidValueError, match="bandwidth_bytes_per_s"):
        ManyCore(0)
    with pytest.raises(InvalidValueError, match="at most the mean"):
        ManyCore(1, 10, 20)


def test_rows_of_a_batch_come_one_after_another() -> None:
    world = ManyCoreWorld({"a": table((160 * US, 0))}, ManyCore(10 * GB))
    assert played(world, [(0, launch(0, (0, 1), (0,), work=Work("a", 0, 3, 0, 1)))]) == {0: 480 * US}


def test_draws_of_conflicts_do_not_hang_on_the_order_of_events() -> None:
    one, other = ManyCore(GB, seed=1).conflicts_ns(), ManyCore(GB, seed=2).conflicts_ns()
    assert one == ManyCore(GB, seed=1).conflicts_ns()
    assert one != other
    assert np.log(one).std() == pytest.approx(math.sqrt(2 * math.log(2.2)), rel=0.05)
