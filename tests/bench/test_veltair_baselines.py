"""Baselines of VELTAIR's benchmarks: the decisions of model_wise and prema."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.veltair._baselines import ModelWise, Prema
from block_sides import Side, even, hold, number_of, sides, starts_of
from cotenant.core.snapshot import Snapshot
from cotenant.techniques.layer_blocks.policy.block_jobs import BlockSnapshot, BlockStart, Change
from cotenant.work import Share

SOME = settings(max_examples=80, deadline=None, database=None)
UNUSED: Snapshot = None  # type: ignore[assignment]


def lanes_of(blocks: BlockSnapshot) -> tuple[Share, ...]:
    return tuple(Share((core,)) for core in range(blocks.total))


def prema(blocks: BlockSnapshot, quantum: int = 1) -> list[Change]:
    return list(Prema(lanes_of(blocks), quantum_ms=quantum / 1e6).changes(replace(blocks), UNUSED))


def whole(blocks: BlockSnapshot, target: float = 0.9) -> list[Change]:
    return list(ModelWise(lanes_of(blocks), target=target).changes(replace(blocks), UNUSED))


@SOME
@given(sides(), st.booleans())
def test_decisions_of_whole_models_hold(case: tuple, drops: bool) -> None:
    side, jobs, now, free = case
    blocks = side.sees(jobs, now, free, drops)
    made = whole(blocks)
    hold(blocks, made)
    begun = starts_of(made)
    assert all(start.end == start.job.model.units for start in begun)
    assert all(start.wanted == 0 for start in begun), "whole models wait for their cores"


def test_whole_models_start_by_arrival_and_none_passes_a_waiting_one() -> None:
    side = Side([even(2, 4, 800), even(1, 4, 100)], 4)
    wide, narrow, late = side.waits(0, 0, 0, 1000), side.waits(1, 1, 10, 10_000), side.waits(0, 0, 30, 1030)
    (start,) = starts_of(whole(side.sees([wide, narrow], 20, 4), 0.5))
    assert start.cores == 4, "on the fewest cores that take half of its SLO"
    waits = whole(side.sees([wide, narrow], 20, 3), 0.5)
    assert waits == [], "it waits for all of them, and so does the one behind it"
    made = whole(side.sees([late, narrow], 40, 3), 0.5)
    assert [number_of(change) for change in made] == [1], "the first to come starts while it fits"


@SOME
@given(sides(), st.booleans())
def test_decisions_of_prema_hold(case: tuple, drops: bool) -> None:
    side, jobs, now, free = case
    blocks = side.sees(jobs, now, free, drops)
    made = prema(blocks)
    hold(blocks, made)
    begun = starts_of(made)
    waits = len(made) - len(begun) < len(blocks.ready)
    assert len(begun) == (1 if free == side.total and waits else 0)


def test_tokens_grow_with_waiting_and_the_shortest_of_those_with_enough_goes() -> None:
    side = Side([even(4, 2, 1000), even(1, 2, 1000)], 2)
    long, short = side.waits(0, 0, 0, 90_000), side.waits(1, 1, 3000, 90_000)

    def chosen(now: int, *jobs: object) -> list[int]:
        return [number_of(change) for change in prema(side.sees(list(jobs), now, 2))]

    assert chosen(3000, long, short) == [1], "1 + 3000 / 2000 tokens are fewer than 3"
    assert chosen(4000, long, short) == [1], "the short one has 1 + 1000 / 500: 3 as well"
    assert chosen(4000, long, side.waits(1, 1, 3900, 90_000)) == [0]
    assert prema(side.sees([long, short], 4000, 1)) == [], "one task at a time"
    (start,) = prema(side.sees([long], 0, 2), quantum=600)
    assert isinstance(start, BlockStart)
    assert start.end == 2, "at the first unit after the quantum"
