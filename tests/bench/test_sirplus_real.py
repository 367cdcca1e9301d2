"""The benchmarks of placed models on real cores, in small."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench._registry import benchmarks
from bench.papers.sirplus import lane, real
from cotenant.measure.solo import Effort
from cotenant.techniques.placement.plan.flat import PLAIN, PlacementProblem
from onnx_samples import Sketch, info
from repositories import write_model


def test_they_are_there() -> None:
    assert {"sirplus-real", "lane"} <= set(benchmarks())


def test_lanes_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lane, "_NAP_S", 0.0)
    summary = lane.measured(3)["summary"]
    assert set(summary) == {"chain_overhead_us", "handover_us", "handover_queued_us", "bare_lock_us"}
    assert min(summary[name] for name in ("handover_us", "handover_queued_us")) > 0
    assert "a lane that sleeps" in capsys.readouterr().out


def test_wide_models_run_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fork stands in for the zoo's models, whose export takes long."""
    s = Sketch(1)
    stem = s.op("MatMul", "x", s.weight(4, 4))
    s.op("Concat", *(s.op("MatMul", stem, s.weight(4, 4)) for _ in range(4)), out="y", axis=1)
    fork = s.model([info("x", ["batch", 4])], [info("y", ["batch", 16])])
    for name in (real.SSD, real.LINEAR):
        write_model(tmp_path, name, "[tenant]\nslo_ms = 1000\n", {1: lambda: fork})
    monkeypatch.setattr(real, "build_repository", lambda *_: [])
    monkeypatch.setattr(real, "PlacementProblem", partial(PlacementProblem, loops=PLAIN))
    monkeypatch.setattr(real, "_STEPS", 200)
    few = Effort(0.0, 1, 1, 0)
    result = real.measured(tmp_path, [real.SSD, real.LINEAR], real.RealEffort(few, 0.05, 1, 2, 5.0))
    rows: Any = result["rows"]
    assert [row["model"] for row in rows] == [real.SSD, real.LINEAR]
    assert all(row["max_error"] == 0 for row in rows)
    assert all(set(row["chosen_from_ms"]) >= {"sequential", "two lanes", "mixed"} for row in rows)
    assert all(row["pieces"] == 1 for row in rows if row["best"] == "sequential")
    assert "ORT: its parallel executor" in capsys.readouterr().out
    ratios = {"best": "two lanes", "best_over_sequential": 0.9, "best_over_ort_parallel": 0.5}
    worse = {"model": "other", "best": "sequential", "best_over_sequential": 1.2, "best_over_ort_parallel": 2.0}
    assert real.summary_of([{"model": real.SSD, **ratios}, worse]) == pytest.approx(
        {
            "over_sequential_geomean": (0.9 * 1.2) ** 0.5,
            "placed_over_sequential_geomean": 0.9,
            "placed_models": 1.0,
            "worst_over_sequential": 1.2,
            "ssd_wide_over_sequential": 0.9,
            "over_ort_parallel_geomean": 1.0,
        }
    )
