"""Which versions are kept, against every other choice."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.techniques.layer_blocks.compile.selection import (
    Reading,
    front,
    layer_targets,
    least_regret,
    pruned,
    single_pass,
    uniform,
)

READINGS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=14).map(
    lambda rows: [Reading(f"c{at}", float(ns), par, loc) for at, (ns, par, loc) in enumerate(rows)]
)
TIMES = st.integers(1, 4).flatmap(
    lambda levels: st.lists(
        st.lists(st.integers(50, 200).map(float), min_size=levels, max_size=levels), min_size=1, max_size=9
    ).map(lambda rows: {f"c{at}": row for at, row in enumerate(rows)})
)


def mean(chosen: tuple[str, ...] | list[str], times: dict[str, list[float]]) -> float:
    levels = range(len(times[chosen[0]]))
    return sum(min(times[name][at] for name in chosen) for at in levels) / len(levels)


@given(READINGS)
def test_the_front_is_what_no_other_beats_in_both(readings: list[Reading]) -> None:
    expected = {
        each.name
        for each in readings
        if not any(o.locality < each.locality and o.parallelism < each.parallelism for o in readings)
    }
    found = front(readings)
    assert {each.name for each in found} == expected
    assert [each.locality for each in found] == sorted(each.locality for each in found)


def test_a_uniform_choice_takes_both_ends() -> None:
    row = [Reading(f"c{at}", 1.0, 1, at) for at in range(9)]
    assert [each.locality for each in uniform(row, 5)] == [0, 2, 4, 6, 8]
    assert uniform(row[:3], 5) == row[:3]
    assert uniform(row, 1) == row[:1]


@given(TIMES)
def test_pruning_keeps_the_fewest_that_are_within_ninety_per_cent(times: dict[str, list[float]]) -> None:
    names = list(times)
    levels = range(len(times["c0"]))

    def fits(chosen: tuple[str, ...]) -> bool:
        best = [min(times[name][at] for name in names) for at in levels]
        return all(best[at] / min(times[name][at] for name in chosen) >= 0.9 - 1e-12 for at in levels)

    kept = pruned(names, times)
    least = min(count for count in range(1, len(names) + 1) if any(fits(c) for c in combinations(names, count)))
    assert fits(tuple(kept))
    assert len(kept) == least


@given(TIMES, st.integers(1, 5))
def test_no_other_set_with_the_fastest_has_less_regret(times: dict[str, list[float]], count: int) -> None:
    chosen = least_regret(times, count, pays=0.0)
    fastest = min(times, key=lambda name: times[name][0])
    assert times[chosen[0]][0] == times[fastest][0]
    first = chosen[0]
    others = [name for name in times if name != first]
    sets = [(first, *some) for k in range(count) for some in combinations(others, k)]
    assert mean(chosen, times) == pytest.approx(min(mean(some, times) for some in sets))
    assert len(set(chosen)) == len(chosen) <= count


def test_a_version_that_does_not_pay_is_left_out() -> None:
    times = {"fast": [100.0, 200.0], "robust": [120.0, 130.0], "between": [105.0, 198.0]}
    assert least_regret(times) == ["fast", "robust"]
    assert least_regret({"fast": [100.0, 200.0], "between": [105.0, 198.0]}) == ["fast"]
    assert least_regret(times, 1) == ["fast"]
    assert least_regret({"only": [3.0]}) == ["only"]


def test_two_versions_may_pay_where_one_alone_does_not() -> None:
    """A third version is weighed even where the best second one takes off too little."""
    times = {"a": [100.0, 200.0, 200.0], "b": [110.0, 196.0, 300.0], "c": [110.0, 300.0, 196.0]}
    assert least_regret(times, 3, pays=0.008) == ["a", "b", "c"]


def test_one_pass_filters_by_the_target_then_takes_the_front() -> None:
    readings = [
        Reading("slow", 90, 1, 1),
        Reading("fast", 10, 8, 8),
        Reading("mid", 20, 4, 4),
        Reading("off", 15, 9, 9),
    ]
    assert single_pass(readings, 50) == ["mid"]
    assert single_pass(readings, 100) == ["slow"]
    tied = [Reading("a", 10, 9, 1), Reading("b", 12, 5, 5), Reading("c", 14, 1, 9), Reading("d", 99, 1, 1)]
    assert single_pass(tied, 50) == ["a", "b", "c"]
    assert single_pass(tied, 50, {"a": [10, 30], "b": [12, 19], "c": [14, 18]}) == ["a", "c"]
    assert single_pass(tied, 5) == ["d", "a", "c"]  # none reaches it: none is filtered


def test_targets_are_shares_of_time_or_of_operations() -> None:
    assert layer_targets(100, [1, 3], [9, 1]) == [25, 75]
    assert layer_targets(100, [1, 3], [9, 1], "operations") == [90, 10]
    with pytest.raises(InvalidValueError):
        layer_targets(100, [0, 0], [1, 1])
