"""Blocks and tensors of a shared memory: nothing overlaps, nothing is lost, and what is let go of is told once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cotenant.errors import CotenantError
from cotenant.execute.worker.shared_tensors import TensorLayout
from cotenant.serve.link.arena import INLINE_BYTES, Arena, ArenaFullError, ArenaReader, FreedBlocks, TensorPlace
from cotenant.serve.link.blocks import LEAST_BYTES, Blocks

PAGES = 64
SIZES = st.integers(1, PAGES * LEAST_BYTES)


class OneOfBlocks(RuleBasedStateMachine):
    """Takes and gives back, in any order, beside a list of what is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(PAGES * LEAST_BYTES)
        self.used: dict[int, int] = {}

    @rule(needed=SIZES)
    def take(self, needed: int) -> None:
        offset = self.blocks.take(needed)
        if offset is None:
            return
        size = self.blocks.size(offset)
        assert size >= needed
        assert size == LEAST_BYTES or size < 2 * needed
        assert offset % size == 0
        assert 0 <= offset <= offset + size <= PAGES * LEAST_BYTES
        assert all(offset + size <= at or at + length <= offset for at, length in self.used.items())
        self.used[offset] = size

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.used)))
        del self.used[offset]
        self.blocks.give_back(offset)

    @precondition(lambda self: not self.used)
    @rule()
    def whatever_was_before_all_of_it_can_be_had_at_once(self) -> None:
        assert self.blocks.take(PAGES * LEAST_BYTES) == 0
        self.blocks.give_back(0)

    @invariant()
    def counts(self) -> None:
        assert (len(self.blocks), self.blocks.used) == (len(self.used), sum(self.used.values()))


TestBlocks = OneOfBlocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_block_that_is_not_in_use_is_not_given_back_twice() -> None:
    blocks = Blocks(4 * LEAST_BYTES)
    offset = blocks.take(1)
    assert offset is not None
    blocks.give_back(offset)
    with pytest.raises(KeyError):
        blocks.give_back(offset)
    with pytest.raises(ValueError, match="expected a power of two of pages"):
        Blocks(3 * LEAST_BYTES)
    assert blocks.take(5 * LEAST_BYTES) is None


# --- tensors ----------------------------------------------------------------------------------------------------------

NUMBERS = (np.bool_, np.int8, np.uint16, np.int64, np.float16, np.float32, np.float64, ml_dtypes.bfloat16)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(NUMBERS))
        made = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        return made[..., ::-1] if shape and draw(st.booleans()) else made
    made = np.empty(shape, np.object_)
    made[...] = b""
    for at in np.ndindex(shape):
        made[at] = draw(st.binary(max_size=9))
    return made


@pytest.fixture(name="both", scope="module")
def arena_and_reader() -> Iterator[tuple[Arena, ArenaReader, list[int]]]:
    freed: list[int] = []
    arena = Arena("test", 1 << 22)
    yield arena, ArenaReader(arena.descriptor, freed.append), freed
    arena.close()


@given(
    tensors=st.dictionaries(st.text(max_size=5), arrays(), max_size=4), repeats=st.integers(1, 3), large=st.booleans()
)
def test_tensors_come_out_as_they_went_in(
    both: tuple[Arena, ArenaReader, list[int]], tensors: dict[str, Any], repeats: int, large: bool
) -> None:
    arena, reader, freed = both
    if large:
        tensors = {**tensors, "large": np.arange(500, dtype=np.float32)}
    for _ in range(repeats):
        place = arena.write(tensors)
        found = reader.read(place)
        assert list(found) == list(tensors)
        for name, array in tensors.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            assert np.array_equal(found[name], array)
            assert array.dtype.kind == "O" or not found[name].flags.writeable
        assert (place.block >= 0) == (place.nbytes > INLINE_BYTES)
        del found
        assert freed == ([place.block] if place.block >= 0 else [])
        for block in freed:
            arena.free(block)
        freed.clear()
        assert (arena.used, reader.held) == (0, 0)


def test_a_block_is_let_go_of_with_the_last_view_into_it(both: tuple[Arena, ArenaReader, list[int]]) -> None:
    arena, reader, freed = both
    place = arena.write({"x": np.arange(4000.0).reshape(40, 100), "y": np.ones(9)})
    found = reader.read(place)
    row, pieces = found["x"][3:4], memoryview(found["y"].view(np.uint8)).cast("B")
    del found
    assert freed == []
    assert row[0, 0] == 300.0
    del row
    assert freed == []
    pieces.release()
    del pieces
    assert freed == [place.block]
    arena.free(freed.pop())
    arena.free(place.block)  # what is free already is left alone
    assert arena.used == 0


def test_what_does_not_fit_is_refused_and_the_rest_goes_on() -> None:
    freed: list[int] = []
    arena = Arena("test", 1 << 16)
    reader = ArenaReader(arena.descriptor, freed.append)
    held = reader.read(arena.write({"x": np.zeros(6000, np.uint8)}))
    with pytest.raises(ArenaFullError, match="leave no room"):
        arena.write({"x": np.zeros(1 << 16, np.uint8)})
    again = reader.read(arena.write({"x": np.ones(6000, np.uint8)}))
    assert held["x"].sum() == 0
    assert again["x"].sum() == 6000
    arena.close()


@pytest.mark.parametrize(
    "place",
    [
        TensorPlace((), -2, 10),
        TensorPlace((), 0, (1 << 16) + 1),
        TensorPlace((), 1 << 20, 1),
        TensorPlace((TensorLayout("x", "<f4", (4,), 8, 16),), 0, 16),
        TensorPlace((TensorLayout("x", "<f4", (4,), -8, 16),), 0, 16),
        TensorPlace((TensorLayout("x", "<f4", (1 << 20,), 0, 16),), 0, 16),
        TensorPlace((TensorLayout("x", "<f4", (4,), 0, 16),), -1, 16, b"1234"),
    ],
)
def test_places_outside_are_refused(place: TensorPlace) -> None:
    arena = Arena("test", 1 << 16)
    reader = ArenaReader(arena.descriptor, lambda _: None)
    with pytest.raises(CotenantError):
        reader.read(place)
    arena.close()


def test_large_blocks_give_their_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.serve.link.arena._KEPT_BYTES", 0)
    arena = Arena("test", 1 << 26)
    place = arena.write({"x": np.ones(1 << 22, np.uint8)})
    assert arena.resident >= 1 << 22
    arena.free(place.block)
    assert arena.resident == 0
    again = arena.write({"x": np.ones(1 << 22, np.uint8)})
    reader = ArenaReader(arena.descriptor, lambda _: None)
    assert reader.read(again)["x"].sum() == 1 << 22
    arena.close()


def test_freed_blocks_wake_once_for_all_that_comes_before_they_are_taken() -> None:
    woken: list[int] = []
    freed = FreedBlocks(lambda: woken.append(1))
    for block in (3, 1, 2):
        freed.add(block)
    assert (len(woken), freed.taken(), freed.taken()) == (1, [3, 1, 2], [])
    freed.add(4)
    assert (len(woken), freed.taken()) == (2, [4])
