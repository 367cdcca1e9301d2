"""Planners by name: those of the package, and those that others add."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cotenant import registry
from cotenant.errors import PlanError
from cotenant.techniques.partitions.plan import planners
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.planners import is_blind, make_planner, register
from cotenant.techniques.partitions.plan.types import Planner


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planners, "_REGISTERED", {})


def mine(headroom: float, effort: float) -> Planner:
    return Elastic(headroom=headroom, label=f"mine at {effort}")


def test_a_planner_is_registered_once() -> None:
    register("mine", mine, is_blind=True)
    assert make_planner("mine", 0.2, 0.5) == Elastic(headroom=0.2, label="mine at 0.5")
    assert is_blind("mine")
    assert is_blind("elastic")
    assert not is_blind("ours")
    assert not is_blind("nobody")
    with pytest.raises(PlanError, match="'mine' is registered already"):
        register("mine", mine)


def test_an_installed_package_adds_a_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Point:
        name: str

        def load(self) -> object:
            assert self.name == "mine", "only what is asked for is loaded"
            return mine

    asked = []

    def entry_points(group: str) -> list[Point]:
        asked.append(group)
        return [Point("other"), Point("mine")]

    monkeypatch.setattr(registry, "_entry_points", entry_points)
    assert make_planner("mine").name == "mine at 1.0"
    assert asked == [registry.PLANNERS]


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(
        PlanError, match=r"expected one of ours, elastic_int, elastic, or .*'cotenant.planners'; .*bench"
    ):
        make_planner("ideal")
