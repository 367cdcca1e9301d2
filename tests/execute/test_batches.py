"""The books of batches: whoever asked gets his rows, and where nobody can tell whose they are nobody gets any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cotenant.core.actions import Launch
from cotenant.execute.batches import Batches, ModelGoneError, RowsError, are_alike
from cotenant.execute.runner import joined
from cotenant.work import Share, Work


def launch(queries: tuple[int, ...], items: int, start: int = 0) -> Launch:
    return Launch(0, 7, queries, Work("a", 0, items, start, start + 1), False, Share((0,)), 1)


def rows_of(query: int, count: int) -> Any:
    return np.arange(count) + 100 * query


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=6), left=st.sets(st.integers(0, 5)), cuts=st.integers(0, 3)
)
def test_who_stays_gets_his_rows_whoever_left(rows: list[int], left: set[int], cuts: int) -> None:
    batches = Batches()
    for query, count in enumerate(rows):
        batches.put(query, {"x": rows_of(query, count), "also": -rows_of(query, count)})
    stay = tuple(query for query in range(len(rows)) if query not in left) or (0,)
    batch = batches.begin(launch(tuple(range(len(rows))), sum(rows)))
    kept: Any = {name: joined(pieces) for name, pieces in batch.gather().items()}
    for at in range(1, cuts + 1):
        batches.pause(launch(stay, sum(rows)), batch, kept)
        for query in range(len(rows)):
            if query not in stay:
                batches.discard(query)
        batch = batches.begin(launch(stay, sum(rows), at))
        assert batch.kept is kept
    batches.finish(launch((1,), 1), batch, kept)
    for query in stay:
        got = batches.take(query)
        assert got["x"].tolist() == rows_of(query, rows[query]).tolist()
        assert got["also"].tolist() == (-rows_of(query, rows[query])).tolist()
    for query in range(len(rows)):
        batches.discard(query)
    assert len(batches) == 0


@pytest.mark.parametrize("wrong", [np.zeros((4, 2)), np.zeros((2, 2)), np.zeros(()), np.zeros((0, 3))])
def test_an_output_without_a_row_for_a_row_answers_nobody(wrong: Any) -> None:
    batches = Batches()
    for query, count in enumerate((1, 2)):
        batches.put(query, {"x": rows_of(query, count)})
    batch = batches.begin(launch((0, 1), 3))
    with pytest.raises(RowsError, match=r"output 'odd' has shape .*, expected 3 rows: set max_batch = 1"):
        batches.finish(launch((1,), 1), batch, {"right": np.zeros((3, 2)), "odd": wrong})
    for query in (0, 1):
        with pytest.raises(KeyError):
            batches.take(query)


def test_where_batches_run_as_one_a_part_is_refused() -> None:
    batches: Batches[Any] = Batches()
    batches.put(0, {"x": rows_of(0, 2)})
    part = structs.replace(launch((0,), 1), work=Work("a", 0, 1, 0, 1, rows=(0, 1)), part=True)
    with pytest.raises(RowsError, match="runs a batch as one launch, not as several tasks"):
        batches.begin(part)


def test_a_query_alone_gets_all_that_there_is() -> None:
    batches = Batches()
    batches.put(0, {"x": rows_of(0, 1)})
    batch = batches.begin(launch((0,), 1))
    assert batch.gather() == {"x": [rows_of(0, 1)]}
    found = np.zeros((17, 4))
    batches.finish(launch((1,), 1), batch, {"found": found})
    assert batches.take(0) == {"found": found}


@pytest.mark.parametrize(
    "inputs",
    [
        [{"x": rows_of(0, 1)}, {"x": rows_of(1, 1)}],
        [{"x": rows_of(0, 1)}, {"x": rows_of(1, 2), "y": rows_of(1, 1)}],
        [{"x": rows_of(0, 1)}, {}],
    ],
    ids=["too few", "tensors that differ", "nothing"],
)
def test_inputs_that_are_not_the_rows_of_the_launch_are_not_merged(inputs: list[dict[str, Any]]) -> None:
    batches = Batches()
    for query, tensors in enumerate(inputs):
        batches.put(query, tensors)
    with pytest.raises(RowsError, match="expected 3 in every tensor"):
        batches.begin(launch((0, 1), 3)).gather()


def test_what_is_released_cannot_go_on() -> None:
    batches = Batches()
    batches.put(0, {"x": rows_of(0, 1)})
    batches.pause(launch((0,), 1), batches.begin(launch((0,), 1), "there"), {})
    with pytest.raises(ModelGoneError):
        batches.begin(launch((0,), 1, 1), "elsewhere")
    assert batches.release(7) == "there"
    assert batches.release(7) is None
    with pytest.raises(ModelGoneError):
        batches.begin(launch((0,), 1, 1))


@pytest.mark.parametrize(
    ("expected", "got", "is_alike"),
    [
        ([100.0, 0.0], [100.9, 0.9], True),
        ([100.0, 0.0], [100.0, 1.1], False),
        ([0.0, 0.0], [0.0, 1e-9], False),
        ([-np.inf, 1.0], [-np.inf, 1.009], True),
        ([-np.inf, 1.0], [-np.inf, 2.0], False),
        ([-np.inf, 1.0], [0.0, 1.0], False),
        ([1.0, 2.0], [1.0], False),
        ([1.0], [[1.0]], False),
        ([], [], True),
        ([100, 0], [100, 1], False),
        ([b"a", b"b"], [b"a", b"b"], True),
        ([b"a", b"b"], [b"a", b"c"], False),
    ],
)
def test_outputs_are_alike_that_differ_by_rounding_alone(expected: list[Any], got: list[Any], is_alike: bool) -> None:
    dtype = object if expected and isinstance(expected[0], bytes) else None
    assert are_alike(np.array(expected, dtype), np.array(got, dtype)) is is_alike
