"""What planners are told of the simulated A100, and the largest rates that are planned with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench._data import DATA
from bench.papers.abacus._a100 import A100
from bench.papers.abacus._group_costs import DEVICE, NetworkCosts, latency_ns
from bench.papers.abacus.partitions import PLANNER, STEP, _Best, _checked, _compared, largest
from cotenant.techniques.partitions.plan.table_costs import WithoutGroups
from cotenant.techniques.partitions.plan.types import Load, Plan
from cotenant.work import Work

MS = 1_000_000
NAMES = ("resnet50", "vgg16", "bert")


@pytest.fixture
def world(tmp_path: Path) -> A100:
    """A device by a network for pairs: 2 ms, 0.25 ms a row of the member of the higher index, 0.5 of the other.

    A model alone counts as the other.
    """
    weights = np.zeros(7 + 4 * 2)
    weights[[7 + 2, 7 + 6]] = 0.5, 0.25
    layers = {"W1": np.array([weights, weights]), "b1": np.zeros(2), "W4": np.full((1, 2), 0.5), "b4": np.full(1, 2.0)}
    layers |= {f"{kind}{n}": value for n in (2, 3) for kind, value in (("W", np.eye(2)), ("b", np.zeros(2)))}
    path = tmp_path / "pairs.npz"
    np.savez(path, **layers)  # type: ignore[arg-type]
    return A100(DATA, {2: path})


def test_costs_are_what_the_networks_say(world: A100) -> None:
    costs = NetworkCosts(world, NAMES, 2)
    assert costs.latency_ns(Work("vgg16", 0, 8), 100, "a100") == 6 * MS
    assert costs.latency_ns(Work("vgg16", 0, 9), 100, "a100") == 10 * MS, "rows are padded to a measured batch"
    assert costs.batches("bert") == (4, 8, 16, 32)
    assert costs.divisions(100, 2, "a100") == ((50, 50),)
    assert costs.divisions(100, 3, "a100") == ()
    assert costs.group_ns([("bert", 16, 50), ("vgg16", 8, 50)], 100, "a100") == (2 + 4 + 4) * MS
    assert costs.group_ns([("vgg16", 7, 50), ("bert", 16, 50)], 100, "a100") == (2 + 4 + 4) * MS
    assert costs.group_ns([("vgg16", 4, 50), ("vgg16", 8, 50)], 100, "a100") is None
    assert latency_ns(world, (("bert", 32), ("resnet50", 4))) == pytest.approx(12 * MS)


def test_a_group_is_no_quicker_than_a_part_of_it(world: A100) -> None:
    costs = NetworkCosts(world, NAMES, 2)
    assert costs.group_ns([("bert", 32, 50), ("vgg16", 4, 50)], 100, "a100") == 18 * MS, "bert alone, not 12 ms"


def test_the_largest_rates_are_those_of_the_best_rounds(world: A100) -> None:
    """Of two alike that take 18 ms each at batch 32, a group takes 26: a gain of 36 / 26."""
    costs = NetworkCosts(world, NAMES, 2)
    loads = [Load(name, name, 100.0, 1000 * MS) for name in NAMES[:2]]
    found = _compared(costs, loads, 1, 200)
    assert found.in_turn_per_s == pytest.approx(2 * 32e3 / 36, rel=STEP - 1)
    assert found.grouped_per_s == pytest.approx(2 * 32e3 / 26, rel=STEP - 1)
    assert found.gain == found.grouped_per_s / found.in_turn_per_s
    assert (found.violations, len(found.groups)) == ((), 1)
    assert min(found.in_turn_attainment, found.grouped_attainment) > 0
    late = [Load(name, name, 100.0, 7 * MS) for name in NAMES[:2]]
    assert largest(costs, late, 1).factor == 0.0


def test_a_plan_that_does_not_hold_is_told(world: A100) -> None:
    costs = NetworkCosts(world, NAMES, 2)
    loads = tuple(Load(name, name, 700.0, 1000 * MS) for name in NAMES)
    plan = PLANNER.plan(loads, [DEVICE], costs)
    assert isinstance(plan, Plan)
    best = _Best(1.0, loads, plan)
    assert _checked(best, costs, 1) == ()
    assert best.plan is not None
    assert any(len(step) > 1 for part in best.plan.devices[0].partitions for step in part.round.steps)
    wrong = _checked(best, WithoutGroups(costs), 1)
    assert wrong
    assert all("no group was measured near" in each or "round" in each for each in wrong)
