"""Memory of bodies: aligned, and never that of a body into which something still looks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cotenant.serve.frontend import body_rooms
from cotenant.serve.frontend.body_rooms import ALIGNMENT, BodyRooms

LARGE = 1 << 20


@given(st.integers(0, 200_000), st.integers(0, 100))
def test_the_first_tensor_is_aligned(nbytes: int, tensors_at: int) -> None:
    room = BodyRooms().room(nbytes, tensors_at)
    assert room.nbytes == nbytes
    if nbytes > tensors_at:
        assert np.frombuffer(room, np.uint8)[tensors_at:].ctypes.data % ALIGNMENT == 0


def test_memory_is_used_again_once_nothing_looks_into_it() -> None:
    rooms = BodyRooms()
    first = rooms.room(LARGE)
    place = np.frombuffer(first, np.uint8).ctypes.data
    array = np.frombuffer(first[100:200].toreadonly(), np.float32)
    del first
    other = rooms.room(LARGE)
    assert np.frombuffer(other, np.uint8).ctypes.data != place, "an array still looks into it"
    del array
    again = rooms.room(LARGE - 5)
    assert np.frombuffer(again, np.uint8).ctypes.data == place
    small = rooms.room(LARGE // 3)
    assert np.frombuffer(small, np.uint8).ctypes.data not in range(place, place + LARGE), "that of a far larger one"


def test_what_is_kept_is_bounded() -> None:
    rooms = BodyRooms()
    held = [rooms.room(16 << 20) for _ in range(9)]
    assert rooms._kept_bytes <= body_rooms._KEPT_BYTES
    assert len(rooms._kept) == body_rooms._KEPT_BYTES // (16 << 20)
    assert len({np.frombuffer(each, np.uint8).ctypes.data for each in held}) == 9
