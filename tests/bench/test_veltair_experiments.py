"""What VELTAIR's benchmarks make of what was played: metrics, rows that are kept, decisions that are timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import _campaign
from bench._data import DATA
from bench.papers import veltair
from bench.papers.veltair import _bound, _capacity, _flat, _flat_slack, _jit, _loop, _play, granularity, overhead, qps
from bench.papers.veltair._capacity import Effort
from bench.papers.veltair._models import CLASSES, read_models
from bench.papers.veltair._worlds import Drawn
from cotenant.core.snapshot import DropRule

MODELS, MADE = read_models(DATA)
DRAWN = Drawn(3, 80.0, 0.8, 0.2, 220_000, 0.05, 4.0, 1.2, 2)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled."""
    modules = tuple(_jit.loaded(each.__name__, compiled=False) for each in (_loop, _flat, _flat_slack))
    monkeypatch.setattr(_play, "compiled", lambda: modules)
    monkeypatch.setattr(_capacity, "_compiled_bound", lambda: _bound)


def rows_of(world: int, ours: float, full: float, base: float, best: float, bound: float) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for load in CLASSES:
        for name in qps.CONTENDERS:
            rate = {"slack_blocks": ours, "FULL": full, "layer_wise": base, "blocks_6": best}.get(name, 1.0)
            row: dict[str, Any] = {"world": world, "class": load, "policy": name, "qps": rate, "target": 0.5}
            row |= {"over_same_alone": 1.1, "over_isolated": 3.0, "qps_paper_protocol": rate / 2}
            made.append(row)
        made.append({"world": world, "class": load, "policy": "clairvoyant", "qps": bound, "qps_99": bound})
    return made


def test_metrics_of_rates_are_medians_over_worlds_and_the_worst_is_the_worst() -> None:
    rows = [*rows_of(1, 30, 20, 10, 25, 60), *rows_of(2, 30, 24, 10, 40, 40), *rows_of(3, 30, 15, 10, 5, 60)]
    summary = qps.summarise(rows)
    for load in CLASSES:
        assert summary[f"full_over_layer_wise_{load}_pct"] == pytest.approx(100)
        assert summary[f"full_over_layer_wise_{load}_pct_paper_protocol"] == pytest.approx(100)
        assert summary[f"ours_over_full_{load}_pct"] == pytest.approx(50)
    assert summary["ours_of_clairvoyant"] == pytest.approx(0.5)
    assert summary["ours_worst_vs_best_baseline_pct"] == pytest.approx(-25)
    assert summary["full_latency_over_same_policy_alone"] == pytest.approx(1.1)
    nothing = qps.summarise([*rows_of(1, 30, 20, 0, 25, 60)])
    assert nothing["full_over_layer_wise_mix_pct"] == float("inf")


def test_a_task_gives_a_row_for_each_policy_whose_rate_is_borne(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qps, "CONTENDERS", {name: qps.CONTENDERS[name] for name in ("model_wise", "FULL")})
    effort = Effort(24, 1, 12, 1, (0.5, 0.8), 0.3)
    rows = qps.judge(MODELS, MADE, qps.Task(DRAWN, "medium", effort, True))
    assert [row["policy"] for row in rows] == ["model_wise", "FULL", "clairvoyant"]
    for row in rows[:2]:
        assert row["qps"] > 0
        assert row["target"] in (0.5, 0.8)
        assert row["worst_model_in_time"][0] >= 0.9  # one of few may miss
        assert row["over_least_work"] >= 1
        assert row["conflicts_per_launch"] <= row["conflicts_per_query"]
    assert rows[1]["qps_paper_protocol"] >= 0
    assert rows[0]["launches_per_query"] <= 1
    assert rows[2]["qps_99"] <= rows[2]["qps"]


def test_gaps_of_granularities_are_medians_over_worlds_of_the_worst_rate() -> None:
    rows = []
    for world, ours in ((1, 90.0), (2, 99.0), (3, 97.0)):
        for kind in ("poisson", "uniform"):
            for rate in granularity.RATES:
                for name in granularity.POLICIES:
                    value = ours if name == "slack_blocks" and rate == 200 and kind == "uniform" else 98.0
                    rows.append(
                        {"world": world, "arrivals": kind, "rate": rate, "policy": name, "satisfied_pct": value}
                    )
    summary = granularity.summarise(rows)
    assert summary["ours_below_best_points"] == pytest.approx(1.0)
    assert summary["ours_below_best_points_uniform_200"] == pytest.approx(1.0)
    assert summary["ours_below_best_points_poisson_200"] == 0


def test_granularities_are_played(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RATES", (100,)), ("POLICIES", ("model_wise", "blocks_11")), ("TARGETS", (0.5,))):
        monkeypatch.setattr(granularity, name, value)
    monkeypatch.setattr(granularity, "PAPER_TARGETS", (1.0,))
    monkeypatch.setattr(granularity, "_TUNE_QUERIES", 5)
    rows = granularity.judge(MODELS, MADE, granularity.GrainTask(DRAWN, True, 20))
    assert [row["policy"] for row in rows] == ["model_wise", "blocks_11"]
    assert all(0 <= row["satisfied_pct"] <= 100 and row["latency_ms"] > 0 for row in rows)
    assert rows[0]["launches_per_query"] == 1


def test_what_is_known_is_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_campaign, "PROCESSES", 1)
    calls: list[int] = []

    def judge(task: int) -> list[dict[str, Any]]:
        calls.append(task)
        if task == 3:
            raise KeyboardInterrupt
        return [{"task": task}]

    with pytest.raises(KeyboardInterrupt):
        _campaign.run_all("some", "key", [1, 2, 3], judge, str)
    assert _campaign.run_all("some", "key", [2, 1, 4], judge, str) == [{"task": 2}, {"task": 1}, {"task": 4}]
    assert calls == [1, 2, 3, 4]
    assert "2 of 3 are known from before" in capsys.readouterr().err
    _campaign.run_all("some", "other", [1], judge, str)
    assert calls[-1] == 1
    data = tmp_path / "data.csv"
    data.write_text("a", encoding="utf-8")
    before = _campaign.digest_of([veltair], [data])
    data.write_text("b", encoding="utf-8")
    assert _campaign.digest_of([veltair], [data]) != before


def test_decisions_are_timed_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_QUICK_QUERIES", 6)
    truth = overhead.tables_of(DRAWN, MODELS[1], MADE)
    row = overhead._timed(truth, DRAWN.machine, "FULL", overhead.POLICIES["FULL"], True)
    assert row["per_query_us"] > 0
    assert row["per_decision_us"] > 0
    assert overhead.block_formation_us(DRAWN, MODELS[0], MADE, rounds=3) > 0


def test_options_of_policies_are_the_ones_that_are_compared() -> None:
    assert {policy.drop for policy in qps.CONTENDERS.values()} == {DropRule.HOPELESS}
    assert set(granularity.POLICIES) <= set(qps.CONTENDERS)
    assert json.dumps(qps.summarise(rows_of(1, 1, 1, 1, 1, 1)))
