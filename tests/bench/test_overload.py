"""The benchmarks of overload and of shares: what they compare, on numbers that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench import overload, shares
from bench._overload import FOUR, Bounds, demands, in_time, poisson, rates_of, section, simulated
from cotenant.metrics import OutcomeLog
from cotenant.types import Outcome
from cotenant.workload import Poisson, TenantLoad, Workload
from cotenant.workload.bound import TimedQuery


def test_work_is_shared_equally_and_nobody_sends_more_than_the_most() -> None:
    times = {"a": 10e6, "b": 20e6, "c": 1e6}
    assert rates_of(times, 2, 1.5) == pytest.approx({"a": 100, "b": 50, "c": 1000})
    capped = rates_of(times, 2, 1.5, most=40)
    assert capped == {"a": 40, "b": 40, "c": 40}
    capped = rates_of(times, 2, 0.5, most=40)
    assert capped == pytest.approx({"a": 40, "b": (1 - 0.4 - 0.04) / 0.02, "c": 40})


def test_a_run_is_set_beside_the_bound_of_each_objective() -> None:
    """One that takes 8 and eight that take 1, in 8: alone on its half, the first would have half an answer."""
    queries = [TimedQuery("a", 0, 8, 8.0), *[TimedQuery("b", 0, 8, 1.0)] * 8]
    weights = {"a": 10.0, "b": 1.0}
    bounds = Bounds.of(queries, 1, weights)
    found = bounds.figures({"a": 0, "b": 8}, weights)
    assert (found["of_most"], found["in_time"], found["asked"]) == (pytest.approx(1), 8, 9)
    assert found["of_shares"] == pytest.approx(8 / 4.5)
    assert (found["of_weighted"], found["of_fair"]) == (pytest.approx(0.8), 0)
    assert found["least_kept"] == found["of_default"] == 0
    found = bounds.figures({"a": 1, "b": 0}, weights)
    assert (found["of_weighted"], found["of_default"]) == (pytest.approx(1), 0)
    assert found["bound_fair"] == pytest.approx(0.5)
    found = bounds.figures({"a": 1, "b": 4}, weights)
    assert found["of_default"] == pytest.approx(min(1, 5 / 4.5))
    assert (found["attainment_a"], found["attainment_b"]) == (1, 0.5)


def test_only_what_comes_after_the_warm_up_is_counted() -> None:
    load = TenantLoad("a", "a", Poisson(100.0))
    plan = Workload((load,), 2_000_000_000, warmup_ns=1_000_000_000)
    queries = demands(plan, {"a": 5}, {"a": 2.0})
    assert 50 < len(queries) < 150
    assert all(each.arrival_ns >= plan.warmup_ns and each.deadline_ns == each.arrival_ns + 5 for each in queries)
    log = OutcomeLog()
    for at, outcome in ((1, Outcome.ANSWERED), (2, Outcome.LATE), (3, Outcome.ANSWERED), (9, Outcome.ANSWERED)):
        log.add("a", at, at + 1, outcome)
    assert in_time(log, "a", 1, 9) == (2, 3)


def test_a_figure_of_the_summary_is_the_worst_of_medians() -> None:
    def row(policy: str, load: float, seed: int, value: float, part: str = "sim") -> dict[str, Any]:
        keys = ("of_default", "of_shares", "of_most", "of_fair", "of_weighted", "in_time")
        return {"part": part, "set": "four", "policy": policy, "load": load, "seed": seed} | dict.fromkeys(keys, value)

    rows = [row(policy, 1.2, seed, 0.9 + seed / 100) for policy in overload.POLICIES for seed in (1, 2, 9)]
    rows += [row(policy, 2.0, seed, 0.8) for policy in overload.POLICIES for seed in (1, 2, 9)]
    rows += [row("most", 2.0, 1, 30, "served"), row("sjf", 2.0, 1, 20, "served")]
    found = overload.summary_of(rows)
    assert overload.worst(rows, "sim", "shares", "of_default") == found["default_of_bound_sim"] == 0.8
    assert overload.worst([each for each in rows if each["load"] == 1.2], "sim", "most", "of_most") == 0.92
    assert found["most_over_sjf_worst_served"] == 1.5
    assert found["most_over_sjf_worst"] == found["most_over_sjf_worst_sim"] == 0.8  # a run without an answer counts one


def test_policies_meet_the_same_arrivals_and_stop_at_boundaries_where_they_can() -> None:
    assert section("sjf").options == {"preempt": True}
    rates = rates_of({each.name: each.ms * 1e6 for each in FOUR}, 2, 2.0)
    plans = [simulated(FOUR, poisson(rates), policy, 1, 1.0) for policy in ("fcfs", "edf")]
    assert plans[0][0] == plans[1][0]
    sent = [{name: len(log.columns(name).outcome) for name in log.tenants} for _, log in plans]
    assert sent[0] == sent[1]
    rows = list(overload.simulate_turn("four", FOUR, 2.0, 1, 0.0, 1.0, ("sjf", "edf")))
    assert [row["policy"] for row in rows] == ["sjf", "edf"]
    assert rows[0]["asked"] == rows[1]["asked"] == sum(sent[0].values())
    assert all(0 < row["of_most"] <= 1 for row in rows)


def test_what_shares_are_worth_is_the_worst_of_tenants_and_factors_and_the_median_of_seeds() -> None:
    def victim(seed: int, factor: int, value: float) -> dict[str, Any]:
        found = {f"attainment_{name}": 1.0 if factor == 1 else value for name in shares.NAMES}
        alone = {f"alone_{name}": 0.98 for name in shares.NAMES}
        return {"case": "victim", "seed": seed, "factor": factor} | found | alone

    rows = [victim(seed, factor, value) for seed, value in ((1, 0.98), (2, 0.97), (3, 0.5)) for factor in (1, 50)]
    rows += [{"case": "unused", "tenant": name, "used_pct": pct} for name, pct in (("a", 96.0), ("b", 99.0))]
    rows += [{"case": "newcomer", "tenant": name, "lost_s": lost} for name, lost in (("a", 0.2), ("b", 0.1))]
    assert shares._metrics(rows) == pytest.approx(
        {
            "victim_drop_points": 1.0,
            "victim_drop_from_1x_points": 3.0,
            "unused_share_used_pct": 96.0,
            "newcomer_s": 0.2,
        }
    )


def test_who_asks_alone_for_twice_the_device_is_given_what_others_leave() -> None:
    share = rates_of({each.name: each.ms * 1e6 for each in FOUR}, 2, 1.0)
    slo_ns = {each.name: round(each.slo_ms * 1e6) for each in FOUR}
    rows = list(shares.cases(shares.simulation, "edf", 1, share, slo_ns, (1,), ("minilm",), 2.0))
    assert [row["case"] for row in rows] == ["victim", "unused", "newcomer", "newcomer"]
    assert rows[1]["used_pct"] > 95
    assert rows[3]["tenant"] == "resnet50"
    assert rows[3]["lost_s"] > 1  # edf has no shares
