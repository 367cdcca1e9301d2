"""Placements as files: what is written is read, and what is broken is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.profiles.profile_file import ProfileError
from cotenant.repository import placement_path
from cotenant.techniques.placement.unit_placement import (
    UnitPlacement,
    cores_of,
    device_names,
    load_placement,
    runs_of,
    save_placement,
)

UNITS = (("0:Conv", "cpu:0-1"), ("1:Relu", "cpu:0-1"), ("3:NMS", "cpu:1"), ("2:NMS", "cpu:0"), ("4:Concat", "cpu:0"))
PLACED = UnitPlacement("net", "graph", 2, 80, 100, 70, runs_of(UNITS))


def test_a_placement_is_kept_as_it_is(tmp_path: Path) -> None:
    path = placement_path(tmp_path / ".cotenant", "graph", 2)
    save_placement(path, PLACED)
    assert load_placement(path) == PLACED
    assert PLACED.units == UNITS
    assert [len(run.units) for run in PLACED.runs] == [2, 1, 2]
    names = [name for name, _ in sorted(UNITS)]
    assert PLACED.places(names, device_names(2)) == ((0, 1, 3, 2, 4), ("cpu:0-1", "cpu:0-1", "cpu:0", "cpu:1", "cpu:0"))


def test_devices_are_the_cores_and_all_of_them() -> None:
    assert device_names(3) == ("cpu:0", "cpu:1", "cpu:2", "cpu:0-2")
    assert [list(cores_of(name)) for name in device_names(3)] == [[0], [1], [2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"cores": 2', '"cores": 0', "cores"),
        ('"net"', '""', "model"),
        ("placement/1", "placement/0", "expected 'cotenant-placement/1'"),
        ('"device"', '"lane"', "lane"),
    ],
)
def test_a_broken_file_is_refused_by_its_key(tmp_path: Path, before: str, after: str, words: str) -> None:
    path = tmp_path / "placement.json"
    save_placement(path, PLACED)
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ProfileError, match=words):
        load_placement(path)


def test_a_placement_of_another_graph_is_refused() -> None:
    with pytest.raises(ProfileError, match="'2:NMS' on 'cpu:0', expected units of the model"):
        PLACED.places(["0:Conv", "1:Relu", "3:NMS"], device_names(2))
    with pytest.raises(ProfileError, match="each of its 6 units once"):
        PLACED.places([*(name for name, _ in UNITS), "5:Add"], device_names(2))
