"""Baselines of VELTAIR's benchmarks: the decisions of model_wise and prema."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.veltair._baseline_rules import decide_prema, decide_whole
from block_sides import Side, even, floors, hold, row
from cotenant.techniques.layer_blocks.policy.rules import ACTS, FIELDS, MODEL, PAUSED, START, STATE, WAITS

SOME = settings(max_examples=80, deadline=None, database=None)


def prema(side: Side, jobs: list[int], now: int, free: int, drops: bool = False, quantum: int = 1) -> list[list[int]]:
    rows = len(jobs) // FIELDS
    out = [0] * (ACTS * rows)
    count = decide_prema(quantum, drops, now, free, side.total, side.dims, side.spans, jobs, rows, out)
    return [out[at : at + ACTS] for at in range(0, count * ACTS, ACTS)]


def whole(side: Side, jobs: list[int], now: int, free: int, drops: bool = False) -> list[list[int]]:
    rows = len(jobs) // FIELDS
    out = [0] * (ACTS * rows)
    count = decide_whole(
        *(side.target, drops, now, free, side.total, 20.0, 0.0),
        *(side.dims, side.spans, side.moved, jobs, rows, out),
    )
    return [out[at : at + ACTS] for at in range(0, count * ACTS, ACTS)]


@SOME
@given(floors(), st.booleans())
def test_decisions_of_whole_models_hold(floor: tuple, drops: bool) -> None:
    side, jobs, now, free, _ = floor
    before = list(jobs)
    made = whole(side, jobs, now, free, drops)
    hold(side, before, jobs, made, now, free)
    begun = [change for change in made if change[1] == START]
    assert all(end == side.models[jobs[FIELDS * at + MODEL]].units for at, _, end, *_ in begun)
    assert all(wanted == 0 for *_, wanted, _, _ in begun), "whole models wait for their cores"


def test_whole_models_start_by_arrival_and_none_passes_a_waiting_one() -> None:
    side = Side([even(2, 4, 800), even(1, 4, 100)], 4, target=0.5)
    wide, narrow = row(0, WAITS, 0, 1000), row(1, WAITS, 10, 10_000)
    assert [c[4] for c in whole(side, [*wide, *narrow], 20, 4)] == [4], "on the fewest cores that take half of its SLO"
    assert whole(side, [*wide, *narrow], 20, 3) == [], "it waits for all of them, and so does the one behind it"
    late = row(0, WAITS, 30, 1030)
    assert [c[0] for c in whole(side, [*late, *narrow], 40, 3)] == [1], "the first to come starts while it fits"


@SOME
@given(floors(), st.booleans())
def test_decisions_of_prema_hold(floor: tuple, drops: bool) -> None:
    side, jobs, now, free, _ = floor
    before = list(jobs)
    made = prema(side, jobs, now, free, drops)
    hold(side, before, jobs, made, now, free)
    begun = [change for change in made if change[1] == START]
    waits = any(WAITS <= jobs[at + STATE] <= PAUSED for at in range(0, len(jobs), FIELDS))
    assert len(begun) == (1 if free == side.total and (begun or waits) else 0)


def test_tokens_grow_with_waiting_and_the_shortest_of_those_with_enough_goes() -> None:
    side = Side([even(4, 2, 1000), even(1, 2, 1000)], 2)
    long, short = row(0, WAITS, 0, 90_000), row(1, WAITS, 3000, 90_000)
    assert [c[0] for c in prema(side, [*long, *short], 3000, 2)] == [1], "1 + 3000 / 2000 tokens are fewer than 3"
    assert [c[0] for c in prema(side, [*long, *short], 4000, 2)] == [1], "the short one has 1 + 1000 / 500: 3 as well"
    assert [c[0] for c in prema(side, [*long, *row(1, WAITS, 3900, 90_000)], 4000, 2)] == [0]
    assert prema(side, [*long, *short], 4000, 1) == [], "one task at a time"
    assert prema(side, [*long], 0, 2, quantum=600)[0][2] == 2, "at the first unit after the quantum"
