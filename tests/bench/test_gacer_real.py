"""The benchmark of sets of models on real cores, in small."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench._registry import benchmarks
from bench.papers.gacer import real
from cotenant.graph.errors import MixedRowsError
from onnx_samples import Sketch, info
from repositories import config, write_model


def deep(layers: int, *, mixes: bool = False) -> Any:
    s = Sketch(layers)
    last = "x"
    for at in range(layers):
        out = "y" if at == layers - 1 else ""
        last = s.op("Softmax", s.op("MatMul", last, s.weight(8, 8)), out=out, axis=0 if mixes and at == 1 else -1)
    return s.model([info("x", ["batch", 8])], [info("y", ["batch", 8])])


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Chains of products stand in for the zoo's models, whose export takes long."""
    root = tmp_path / "models"
    for name, layers, mixes in (("a", 4, False), ("b", 7, False), ("mixing", 5, True), ("short", 3, False)):
        write_model(root, name, config(max_batch=8), {1: lambda layers=layers, mixes=mixes: deep(layers, mixes=mixes)})
    monkeypatch.setattr(real, "build_repository", lambda *_: [])
    monkeypatch.setattr(real, "_PIECE", 1)
    return root


def test_it_is_there() -> None:
    assert real.NAME in benchmarks()


def test_a_set_runs_in_every_way_with_the_same_answers(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = real.measured(small, [{"a": 5, "b": 4}], 2, 0.0, least=0.0)
    [row] = result["rows"]  # type: ignore[misc]
    assert row["set"] == "a:5, b:4"
    assert (row["repetitions"], row["counted"]) == (2, 2)
    assert row["max_error"] <= 1e-5
    assert row["split_over_sequential"] == pytest.approx(result["summary"]["split_over_sequential_geomean"])  # type: ignore[index]
    assert row["split_over_balanced"] == result["summary"]["split_over_free_balanced_min"]  # type: ignore[index]
    assert "by a model, 1 + s (n - 1), not measured" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_said_of_repetitions_beside_others(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = real.measured(small, [{"a": 2}], 2, 0.0, least=99.0)
    [row] = result["rows"]  # type: ignore[misc]
    assert (row["repetitions"], row["counted"]) == (2, 0)
    assert math.isnan(result["summary"]["split_over_sequential_geomean"])  # type: ignore[index]
    assert "0/2" in capsys.readouterr().out


def test_models_that_cannot_be_split_are_named(small: Path) -> None:
    with pytest.raises(MixedRowsError, match="works over axis 0"):
        real.measured(small, [{"mixing": 4}], 1, 0.0)
    with pytest.raises(real.BenchError, match="a model of 3 units has no 4 segments"):
        real.measured(small, [{"short": 4}], 1, 0.0)


def test_the_cores_from_which_splitting_pays() -> None:
    assert real.cores_for(1.1, 0.9, 0.7) == 2  # 1.9 against 1.1 x 1.7
    assert real.cores_for(1.1, 0.85, 0.7) == 3  # 1.85 is less than 1.87; 2.7 is more than 1.1 x 2.4
    assert real.cores_for(1.1, 0.80, 0.7) == 5
    assert real.cores_for(1.1, 0.75, 0.7) == 0, "never: in the end it is 0.75 over 0.7 times as fast"


def test_segments_have_about_the_same_weight_and_none_is_empty() -> None:
    assert real._quarters((1, 1, 1, 1)) == (0, 1, 2, 3, 4)
    assert real._quarters((9, 1, 1, 1, 1)) == (0, 1, 2, 3, 5)
    assert real._quarters((1,) * 8) == (0, 2, 4, 6, 8)
