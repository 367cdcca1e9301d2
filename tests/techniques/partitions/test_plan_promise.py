"""Plans that promise a share of misses, and tenants that cannot be served at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

import cotenant
from cotenant.errors import InvalidValueError, PlanError
from cotenant.predict.latency import LatencyModel
from cotenant.profiles.profile_file import Point, load_profile, save_profile
from cotenant.repository import profile_path
from cotenant.techniques.partitions.plan.advice import Advisor
from cotenant.techniques.partitions.plan.answer import _broken_promises, planned
from cotenant.techniques.partitions.plan.file import PlanFile, Request, parse_plan, plan_text
from cotenant.techniques.partitions.plan.planners import make_planner
from cotenant.techniques.partitions.plan.promise import Promising, missed, share_of, simulated
from cotenant.techniques.partitions.plan.sources import CostBasis
from cotenant.techniques.partitions.plan.table_costs import TableCosts
from cotenant.techniques.partitions.plan.types import DEVICES, MISSES, DeviceType, Infeasible, Load, Plan, Planner
from repositories import write_good

MS = 1_000_000
DEVICE = DeviceType("cpu", ((2,), (1, 1)), 1 << 34)
SMALL, LARGE = 4, 40
COSTS = TableCosts(
    {
        "cpu": {
            name: LatencyModel.of_points(
                {size: {batch: (ms + ms * batch // 4) * MS // size for batch in (1, 2, 4, 8)} for size in (1, 2)}
            )
            for name, ms in (("small", SMALL), ("large", LARGE))
        }
    },
    {"small": 1, "large": 1},
)


def load(name: str, rate: float, slo_ms: float) -> Load:
    return Load(name, name, rate, round(slo_ms * MS))


BURSTY = (load("small", 250.0, 16.0), load("large", 12.0, 120.0))
"""Loads that miss 5 % and more of their SLOs on two devices without a promise."""


def test_a_promise_takes_more_reserve_than_a_plan_without_one() -> None:
    loads, devices = BURSTY, (DEVICE, DEVICE)
    planner = make_planner("elastic_int", 0.1)
    plain = planner.plan(loads, devices, COSTS)
    assert isinstance(plain, Plan)
    assert max(missed(simulated(plain, loads, (), COSTS, rows=3000)[0]).values()) > 0.01
    found = Promising(planner, 0.01, rows=3000).plan(loads, devices, COSTS)
    assert isinstance(found, Plan)
    assert max(missed(simulated(found, loads, (), COSTS, 0.01, 3000)[0]).values()) <= 0.01
    assert sum(found.rates_per_s.values()) > sum(plain.rates_per_s.values())


@settings(max_examples=6)
@given(st.floats(5, 200), st.floats(1, 20), st.sampled_from([0.02, 0.1]), st.integers(1, 3))
def test_what_is_promised_holds_or_is_not_promised(small: float, large: float, misses: float, devices: int) -> None:
    loads = (load("small", small, 40.0), load("large", large, 300.0))
    found = Promising(make_planner("elastic_int", 0.1), misses, rows=600).plan(loads, (DEVICE,) * devices, COSTS)
    if isinstance(found, Plan):
        assert max(missed(simulated(found, loads, (), COSTS, misses, 600)[0]).values()) <= misses


def test_a_promise_that_cannot_be_kept_says_what_was_missed() -> None:
    plain = make_planner("elastic_int", 0.1).plan(BURSTY, (DEVICE, DEVICE), COSTS)
    assert isinstance(plain, Plan)
    tried: list[tuple[Load, ...]] = []

    class Stubborn(Planner):
        """Has one plan."""

        name = "stubborn"

        @override
        def plan(self, loads: Sequence[Load], *other: object) -> Plan | Infeasible:
            tried.append(tuple(loads))
            return plain if len(tried) < 8 else Infeasible("small", DEVICES, "there is no room")

    found = Promising(Stubborn(), 0.01, rows=1000).plan(BURSTY, (DEVICE, DEVICE), COSTS)
    assert isinstance(found, Infeasible)
    assert found.constraint == MISSES
    assert "1.00% are promised; with more reserve for it there is no plan (there is no room)" in found.detail
    rates, slos = ([tuple(getattr(load, key) for load in loads) for loads in tried] for key in ("rate_per_s", "slo_ns"))
    assert rates == sorted(rates)
    assert slos[:4] == [slos[0]] * 4
    assert slos[-1] < slos[0]


def test_the_plan_file_keeps_the_promise_and_the_check_confirms_it() -> None:
    loads, devices = (load("small", 40.0, 30.0),), (DEVICE,)
    planners = make_planner("elastic_int", 0.1), make_planner("elastic_int", 0.1)
    basis = CostBasis(devices, COSTS, None, "f")
    found = planned(planners, Request(loads, devices), basis, headroom=0.1, is_quick=True, misses=0.02)
    assert isinstance(found, tuple)
    kept = parse_plan(plan_text(found[0]), "plan")
    assert kept.misses == 0.02
    assert _broken_promises(kept, COSTS) == []
    assert _broken_promises(replace(kept, misses=None), COSTS) == []
    plain = make_planner("elastic_int", 0.1).plan(BURSTY, (DEVICE, DEVICE), COSTS)
    assert isinstance(plain, Plan)
    broken = _broken_promises(PlanFile(Request(BURSTY, (DEVICE, DEVICE)), plain, 0.1, misses=0.02), COSTS)
    assert [each.split()[0] for each in broken] == ["'small'", "'large'"]


def test_the_check_of_a_file_simulates_its_promise_again(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "add_sub")
    cotenant.profile(root, budget_s=0.0, settings={"device.cores": [0]})
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[[device]]\nname = "cpu"\ncores = 1\n\n[[tenant]]\nname = "add_sub"\nrate = 20\n')
    found = cotenant.plan(tenants, root, planner="elastic_int", quick=True, misses=0.05)
    path = tmp_path / "plan.toml"
    found.save(path)
    assert cotenant.check_plan(path, root).holds
    late = load_profile(profile_path(root))
    slow = {
        name: replace(model, points=tuple(_slower(each) for each in model.points))
        for name, model in late.models.items()
    }
    save_profile(profile_path(root), replace(late, models=slow))
    assert any("are promised" in each for each in cotenant.check_plan(path, root).violations)


def _slower(point: Point) -> Point:
    """The point with latencies that no SLO of the repository allows."""
    times = ("p50_ns", "p90_ns", "p95_ns", "p99_ns")
    return replace(point, **dict.fromkeys(times, 30_000 * MS))


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5%", 0.005), ("0.02", 0.02)])
def test_shares_are_read(text: str, share: float) -> None:
    assert share_of(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "0", "100%", "1", "-1%", "one", "nan"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="expected a share above 0 and below 1"):
        share_of(text)
    with pytest.raises(InvalidValueError):
        Promising(make_planner("elastic_int"), 1.0)


def test_every_tenant_that_cannot_be_served_is_named_with_its_remedy() -> None:
    request = Request((load("small", 5.0, 2.0), load("large", 1.0, 10.0), load("fine", 1.0, 500.0)), (DEVICE,))
    loads = tuple(each if each.tenant != "fine" else Load("fine", "small", 1.0, 500 * MS) for each in request.loads)
    found = Advisor(make_planner("elastic_int", 0.1), replace(request, loads=loads), COSTS).unservable()
    assert [each.name for each in found] == ["small", "large"]
    assert [each.remedies[0].kind for each in found] == ["slo", "slo"]
    for each in found:
        [own] = [one for one in loads if one.tenant == each.name]
        longer = Load(own.tenant, own.model, own.rate_per_s, round(each.remedies[0].value))
        assert isinstance(make_planner("elastic_int", 0.1).plan((longer,), (DEVICE,), COSTS), Plan)
