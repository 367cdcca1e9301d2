"""The world in which launches share cores and memory: against hand calculation, fine time steps, and its own laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build import CORE, ends, launch
from cotenant import trace
from cotenant.core.actions import Action, Respond
from cotenant.core.events import Event
from cotenant.errors import InvalidValueError
from cotenant.policies import policy_class
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.serve.engine.clock import VirtualClock
from cotenant.serve.engine.driver import Driver
from cotenant.sim.driver import simulate
from cotenant.types import Query
from cotenant.work import Machine, Share, Work
from cotenant.world.contention import FULL_SPEED, Contention, ContentionWorld, CoreLoad, Traffic, speeds
from cotenant.world.simulated import SimulatedExecutor, TableWorld
from parity import TABLES as PARITY_TABLES
from parity import TENANTS, workload
from scenario import CORES, TWO_LANES
from strict_engine import StrictEngine as Engine

MS = 1_000_000
MB = 1_000_000
GB = 1_000 * MB


def table(*unit_ms: float, cores: int = 1) -> LatencyTable:
    return LatencyTable((LatencyRow(0, 1, cores, round(sum(unit_ms) * MS)),), unit_ms)


def moving(*unit_mb: float) -> Traffic:
    return Traffic((0,) * len(unit_mb), (tuple(round(mb * MB) for mb in unit_mb),))


# --- by hand -------------------------------------------------------------------------------------------------------

STREAM, THINK = "stream", "think"
TABLES = TablePredictor({STREAM: table(100), THINK: table(100)})
TRAFFIC = {STREAM: moving(800), THINK: moving(0)}
"""Alone, `stream` draws 8 GB/s; `think` draws nothing."""


def world(bandwidth: int | None, **options: float) -> ContentionWorld:
    return ContentionWorld(TABLES, Contention(bandwidth, None, TRAFFIC), **options)  # type: ignore[arg-type]


def test_two_streams_share_the_memory_and_a_thinker_is_left_alone() -> None:
    starts = [(0, launch(n, tenant, partition=CORE[n])) for n, tenant in enumerate((STREAM, STREAM, THINK))]
    # 16 GB/s are asked for, 10 are there: each stream goes at 5/8 of its speed.
    assert ends(world(10 * GB), starts) == {0: 160 * MS, 1: 160 * MS, 2: 100 * MS}
    assert ends(world(16 * GB), starts) == dict.fromkeys(range(3), 100 * MS)
    assert ends(world(None), starts) == dict.fromkeys(range(3), 100 * MS)


def test_rates_change_with_who_runs() -> None:
    starts = [(0, launch(0, STREAM)), (50 * MS, launch(1, STREAM, partition=CORE[1]))]
    # 50 ms alone; then both at 5/8: the first has 50 ms of work left and needs 80 ms, until 130 ms. By then the second
    # has done 50 ms of its work and does the rest alone.
    assert ends(world(10 * GB), starts) == {0: 130 * MS, 1: 180 * MS}


def test_a_core_that_two_launches_hold_is_split() -> None:
    both = Share((0, 1))
    wide = TablePredictor({STREAM: table(100), THINK: LatencyTable((LatencyRow(0, 1, 2, 60 * MS),))})
    shared = ContentionWorld(wide, Contention())
    # The wide launch has half of core 0 until 120 ms, and goes at the speed of its slower core; so does the other.
    assert ends(shared, [(0, launch(0, STREAM)), (0, launch(1, THINK, partition=both))]) == {1: 120 * MS, 0: 160 * MS}


def test_front_ends_take_their_part_of_every_core() -> None:
    assert ends(world(None, front_end_share=0.2), [(0, launch(0, STREAM))]) == {0: 125 * MS}
    # Slowed down to 4/5, each draws 6.4 GB/s, and 12.8 GB/s are enough for both.
    slowed = [(0, launch(0, STREAM)), (0, launch(1, STREAM, partition=CORE[1]))]
    assert ends(world(12_800 * MB, front_end_share=0.2), slowed) == {0: 125 * MS, 1: 125 * MS}


def test_only_the_units_that_move_bytes_are_slowed_down() -> None:
    tables = TablePredictor({"mixed": table(10, 30, 10), STREAM: table(100)})
    contention = Contention(10 * GB, None, {"mixed": moving(0, 240, 0), STREAM: moving(800)})
    starts = [(0, launch(0, "mixed", (0, 3))), (0, launch(1, STREAM, partition=CORE[1]))]
    # Both draw 8 GB/s from 10 to 40 ms alone: at 5/8 that takes until 58 ms, and 10 ms more follow.
    # The stream has then done 10 + 30 of 100 ms, and has nobody beside it that moves anything.
    assert ends(ContentionWorld(tables, contention), starts) == {0: 68 * MS, 1: 118 * MS}
    part = [(0, launch(0, "mixed", (2, 3))), (0, launch(1, STREAM, partition=CORE[1]))]
    assert ends(ContentionWorld(tables, contention), part) == {
        0: tables.latency_ns(Work("mixed", 0, 1, 2, 3), 1),
        1: 100 * MS,
    }


def test_rows_move_bytes_of_their_own_and_weights_are_read_once() -> None:
    tables = TablePredictor({"m": LatencyTable((LatencyRow(0, 1, 1, 100 * MS), LatencyRow(0, 4, 1, 100 * MS)))})
    traffic = {"m": Traffic((400 * MB,), ((100 * MB,), (900 * MB,)))}
    assert traffic["m"].unit_bytes(0, 4) == [800 * MB]
    assert traffic["m"].unit_bytes(7, 1) == [1300 * MB]
    assert replace(traffic["m"], memory_share=0.5).unit_bytes(0, 4) == [400 * MB]
    pair = [(0, launch(0, "m", items=4)), (0, launch(1, "m", partition=CORE[1], items=4))]
    assert ends(ContentionWorld(tables, Contention(8 * GB, None, traffic)), pair) == {0: 200 * MS, 1: 200 * MS}
    # One core draws 4 GB/s at most, so the counted 8 cannot have come from the memory.
    assert ends(ContentionWorld(tables, Contention(8 * GB, 4 * GB, traffic)), pair) == {0: 100 * MS, 1: 100 * MS}


def test_a_launch_may_be_started_ahead_of_its_time() -> None:
    ahead = world(10 * GB)
    ahead.start(launch(0, STREAM), 0)
    assert ahead.next_ns() == 100 * MS
    ahead.start(launch(1, STREAM, partition=CORE[1]), 50 * MS)
    assert ahead.next_ns() == 130 * MS
    ahead.start(launch(2, THINK, partition=CORE[2]), 10 * MS)  # told later, begins earlier
    assert (ahead.next_ns(), ahead.pop()[:2]) == (110 * MS, (2, None))
    assert (ahead.next_ns(), ahead.pop()[:2]) == (130 * MS, (0, None))
    assert (ahead.next_ns(), ahead.pop()[:2]) == (180 * MS, (1, None))


def test_ends_of_one_instant_come_in_the_order_of_their_numbers() -> None:
    coinciding = world(None)
    for number in (2, 0, 1):
        coinciding.start(launch(number, THINK, partition=CORE[number]), 0)
    assert coinciding.next_ns() == 100 * MS
    assert coinciding.pop()[:2] == (0, None)
    coinciding.start(launch(3, THINK), 100 * MS)
    assert [coinciding.pop()[0], coinciding.pop()[0]] == [1, 2]
    assert coinciding.next_ns() == 200 * MS


# --- alone ---------------------------------------------------------------------------------------------------------


@given(
    unit_us=st.lists(st.integers(0, 5000), min_size=1, max_size=30).filter(any),
    unit_kb=st.integers(0, 10**6),
    span=st.tuples(st.integers(0, 29), st.integers(0, 29)),
    items=st.integers(1, 9),
    noise=st.sampled_from([0.0, 0.3]),
    grain_ns=st.sampled_from([1, 500_000]),
)
def test_alone_a_launch_takes_what_the_table_says(
    unit_us: list[int], unit_kb: int, span: tuple[int, int], items: int, noise: float, grain_ns: int
) -> None:
    tables = TablePredictor(
        {"m": LatencyTable((LatencyRow(0, 1, 1, sum(unit_us) * 1000),), tuple(map(float, unit_us)), 1.1)}
    )
    start, end = sorted(min(at, len(unit_us)) for at in span)
    part = launch(0, "m", (start, max(end, start + 1)) if start < len(unit_us) else (start - 1, start), items=items)
    contention = Contention(GB, GB // 2, {"m": Traffic((3,) * len(unit_us), ((unit_kb * 1000,) * len(unit_us),))})
    alone = ContentionWorld(tables, contention, noise=noise, seed=3, grain_ns=grain_ns)
    assert ends(alone, [(7, part)]) == ends(TableWorld(tables, noise=noise, seed=3), [(7, part)])


def test_noise_and_faults_are_drawn_as_in_the_table_world() -> None:
    options = {"noise": 0.4, "failure_rate": 0.3, "seed": 11}
    worlds = [world(None, **options), TableWorld(TABLES, **options), world(None, **{**options, "seed": 12})]  # type: ignore[arg-type]
    told = []
    for each in worlds:
        ended = []
        for number in range(50):
            each.start(launch(number, THINK), number * 1000 * MS)
            ended.append((each.next_ns(), *each.pop()[:2]))
        told.append(ended)
    assert told[0] == told[1] != told[2]
    assert {error for _, _, error in told[0]} == {None, "injected fault"}


# --- fine time steps -----------------------------------------------------------------------------------------------

Job = tuple[int, int, tuple[tuple[int, int], ...]]
"""Start in us, core, and (us alone, MB/s) of each unit."""


def brute(jobs: Sequence[Job], bandwidth_mb_s: int, step_us: float) -> dict[int, float]:
    """Ends in us, by small steps of time and with floating point. Every job has a core of its own."""
    left = {number: [[float(us), rate] for us, rate in units] for number, (_, _, units) in enumerate(jobs)}
    found: dict[int, float] = {}
    now = 0.0
    while len(found) < len(jobs):
        active = [number for number in left if number not in found and jobs[number][0] <= now + 1e-9]
        grants: dict[int, float] = {}
        room = float(bandwidth_mb_s)
        waiting = sorted(active, key=lambda number: left[number][0][1])
        for served, number in enumerate(waiting):
            grants[number] = min(float(left[number][0][1]), room / (len(waiting) - served))
            room -= grants[number]
        for number in active:
            rate = left[number][0][1]
            done = step_us * (grants[number] / rate if rate else 1.0)
            while left[number] and left[number][0][0] <= done + 1e-9:
                done -= left[number].pop(0)[0]
            if left[number]:
                left[number][0][0] -= done
            else:
                found[number] = now + step_us
        now += step_us
    return found


units_of = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=4)
jobs_of = st.lists(st.tuples(st.integers(0, 60), units_of), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(drawn=jobs_of, bandwidth=st.integers(2, 14))
def test_it_ends_when_fine_time_steps_say(drawn: list[tuple[int, list[tuple[int, int]]]], bandwidth: int) -> None:
    jobs: list[Job] = [(at * 10, core, tuple((us * 10, r * 1000) for us, r in u)) for core, (at, u) in enumerate(drawn)]
    jobs = [(at, core, tuple((us, min(r, bandwidth * 1000)) for us, r in units)) for at, core, units in jobs]
    tables, traffic = {}, {}
    for number, (_, _, units) in enumerate(jobs):
        total = sum(us for us, _ in units)
        tables[str(number)] = LatencyTable((LatencyRow(0, 1, 1, total * 1000),), tuple(float(us) for us, _ in units))
        traffic[str(number)] = Traffic((0,) * len(units), (tuple(us * rate for us, rate in units),))
    exact = ContentionWorld(TablePredictor(tables), Contention(bandwidth * GB, None, traffic), grain_ns=1)
    starts = [
        (at * 1000, launch(number, str(number), (0, len(units)), CORE[core]))
        for number, (at, core, units) in enumerate(jobs)
    ]
    starts.sort(key=lambda start: start[0])
    found = ends(exact, starts)
    step = 0.5
    for number, expected_us in brute(jobs, bandwidth * 1000, step).items():
        # Each change of rates may be seen a step late, and slows others down by at most that.
        slack = step * 2 * (1 + sum(len(units) for _, _, units in jobs))
        assert found[number] / 1000 == pytest.approx(expected_us, abs=slack)


# --- laws ----------------------------------------------------------------------------------------------------------

loads_of = st.lists(st.integers(0, 20 * GB), min_size=1, max_size=6)


@given(loads_of, st.integers(1, 40 * GB), st.integers(0, 20 * GB))
def test_who_joins_speeds_nobody_up(demands: list[int], capacity: int, more: int) -> None:
    """With cores of their own, as the core of cotenant gives them."""
    loads = [CoreLoad((core,), demand) for core, demand in enumerate(demands)]
    before = speeds(loads, capacity)
    after = speeds([*loads, CoreLoad((99,), more)], capacity)
    assert all(new <= old + 2 * FULL_SPEED // max(1, d) for new, old, d in zip(after, before, demands, strict=False))
    drawn = sum(load.bytes_per_s * speed for load, speed in zip(loads, before, strict=True))
    assert drawn <= (capacity + sum(demands) // FULL_SPEED + len(demands)) * FULL_SPEED


@settings(deadline=None)
@given(
    drawn=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60), st.integers(0, 9)), min_size=2, max_size=4),
    bandwidth=st.integers(9, 20),
)
def test_no_launch_ends_sooner_for_having_another_one_beside_it(
    drawn: list[tuple[int, int, int]], bandwidth: int
) -> None:
    """Launches of one phase each. With several, one that is slowed down may get out of the way of a third."""
    tables = TablePredictor({str(n): table(ms) for n, (_, ms, _) in enumerate(drawn)})
    traffic = {str(n): moving(ms * rate) for n, (_, ms, rate) in enumerate(drawn)}
    starts = sorted(
        [(at * MS, launch(n, str(n), partition=CORE[n])) for n, (at, _, _) in enumerate(drawn)],
        key=lambda start: start[0],
    )
    contention = Contention(bandwidth * GB, None, traffic)
    crowded = ends(ContentionWorld(tables, contention), starts)
    for gone in range(len(drawn)):
        fewer = ends(ContentionWorld(tables, contention), [start for start in starts if start[1].id != gone])
        assert all(end <= crowded[number] + len(drawn) * 10 for number, end in fewer.items())


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 12))
def test_the_memory_hands_out_what_is_asked_for_and_never_more(drawn: list[tuple[int, int]], bandwidth: int) -> None:
    """All bytes of all launches are moved, in no less time than the memory needs for them."""
    tables = TablePredictor({str(n): table(20) for n in range(len(drawn))})
    traffic = {str(n): moving(20 * min(rate, bandwidth)) for n, (_, rate) in enumerate(drawn)}
    starts = sorted(
        [(at * MS, launch(n, str(n), partition=Share((n,)))) for n, (at, _) in enumerate(drawn)],
        key=lambda start: start[0],
    )
    found = ends(ContentionWorld(tables, Contention(bandwidth * GB, None, traffic)), starts)
    began = {each.id: at for at, each in starts}
    assert all(found[number] - began[number] >= 20 * MS for number in began)
    for first in sorted(began.values()):  # what begins at or after `first` is moved between `first` and the last end
        numbers = [number for number, at in began.items() if at >= first]
        moved = sum(20 * min(drawn[number][1], bandwidth) * MB for number in numbers)
        assert moved <= bandwidth * GB * (max(found[number] for number in numbers) - first) / 1e9 + 100
    alone = sum(20 * MS for _ in drawn)
    if bandwidth * len(drawn) > 0 and min(rate for _, rate in drawn) >= bandwidth:
        idle = max(found.values()) - min(began.values()) - alone
        latest = max(began.values()) - min(began.values())
        assert idle <= latest + 100  # full bandwidth draws: the memory never rests while somebody runs


def test_equal_seeds_give_equal_worlds() -> None:
    starts = [(n * 30 * MS, launch(n, (STREAM, THINK)[n % 2], partition=CORE[n % 4])) for n in range(40)]
    first = ends(world(7 * GB, noise=0.5, seed=4), starts)
    assert ends(world(7 * GB, noise=0.5, seed=4), starts) == first
    assert ends(world(7 * GB, noise=0.5, seed=5), starts) != first


# --- drivers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", [2, 5, 50])
def test_simulator_and_server_write_the_same_log(bandwidth: int) -> None:
    """Ends move while launches run; both drivers must follow them alike."""
    traffic = {"wide": moving(*(10,) * 8), "batchy": moving(20, 0, 20), "urgent": moving(8)}
    contention = Contention(bandwidth * GB, None, traffic)
    queries = workload(seed=bandwidth, gap_ns=7 * MS)

    def parts() -> tuple[Engine, ContentionWorld]:
        tables = TablePredictor(PARITY_TABLES)
        engine = Engine(TENANTS, policy_class("edf")(TWO_LANES), tables, Machine.cpu(CORES))
        return engine, ContentionWorld(tables, contention, noise=0.2, failure_rate=0.05, seed=9)

    lines: tuple[list[bytes], list[bytes]] = [], []
    told: tuple[list[tuple[Respond, int]], list[tuple[Respond, int]]] = [], []

    def log(at: int, now: int, event: Event, actions: list[Action], *_: object) -> None:
        lines[at].append(trace.encode(now, event, actions))

    engine, made = parts()
    simulate(engine, made, queries, lambda respond, now: told[0].append((respond, now)), log=partial(log, 0))
    clock = VirtualClock()
    engine, made = parts()
    driver = Driver(engine, SimulatedExecutor(made, clock), clock, (partial(log, 1),))

    def arrive(query: Query) -> None:
        driver.submit(
            lambda *_: query, {"x": np.zeros(query.items)}, lambda respond, _: told[1].append((respond, clock.now_ns()))
        )

    for query in queries:
        clock.call_at(query.arrival_ns, 2, partial(arrive, query))
    clock.run()
    assert lines[0] == lines[1]
    assert told[0] == told[1]
    assert len(told[0]) == len(queries)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"number of units is 2, expected 1, as in its table"):
        ContentionWorld(TABLES, Contention(GB, None, {STREAM: moving(1, 2)}))
    with pytest.raises(
        InvalidValueError, match=r"row_bytes is \[1\], expected for each declared shape one number a unit"
    ):
        Traffic((1, 2), ((3,),))
    with pytest.raises(InvalidValueError, match="numbers from 0"):
        Traffic((-1,), ((3,),))
    with pytest.raises(InvalidValueError, match="memory_share"):
        Traffic((1,), ((3,),), -0.5)
    with pytest.raises(InvalidValueError, match="bandwidth_bytes_per_s is 0"):
        Contention(0)
    with pytest.raises(InvalidValueError, match="front_end_share is 1"):
        world(GB, front_end_share=1.0)
    with pytest.raises(InvalidValueError, match="running launches"):
        world(GB).pop()
