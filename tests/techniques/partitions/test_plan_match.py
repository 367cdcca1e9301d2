"""Who takes over whose place: everybody once, and never less than half of the best choice."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.techniques.partitions.plan.match import match


@given(st.integers(0, 4).flatmap(lambda n: st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), max_size=n)))
def test_everybody_gets_a_place_and_together_half_of_the_best_at_least(likeness: list[list[int]]) -> None:
    chosen = match((value, new, old) for new, row in enumerate(likeness) for old, value in enumerate(row))
    assert sorted(chosen) == list(range(len(likeness)))
    assert len(set(chosen.values())) == len(chosen)
    best = max(
        sum(row[at] for row, at in zip(likeness, places, strict=True))
        for places in permutations(range(5), len(likeness))
    )
    assert 2 * sum(likeness[new][old] for new, old in chosen.items()) >= best


def test_the_most_alike_come_first_then_in_order() -> None:
    assert match([(1, 0, 0), (3, 1, 0), (1, 0, 1)]) == {1: 0, 0: 1}
    assert match([(0, 1, 1), (0, 0, 1), (0, 0, 0), (0, 1, 0)]) == {0: 0, 1: 1}
    assert match([(2, 0, 0), (1, 1, 0)]) == {0: 0}
