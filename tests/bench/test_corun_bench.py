"""The experiment with sampling, on made-up tables: what it prints and skips. Figures are not asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import _record
from bench.__main__ import main
from bench.papers.gpulet import sampling

MODELS = ("a", "b", "c")
BATCHES = (1, 4)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of three models in halves of a GPU; results and the page are kept apart."""
    monkeypatch.setattr(_record.save, "__defaults__", (tmp_path / "results",))
    monkeypatch.setattr(sampling, "PAGE", tmp_path / "page.html")
    folder = tmp_path / "mps_measured"
    folder.mkdir()
    solo = [f"{model},{batch},50,{batch}" for model in MODELS for batch in BATCHES]
    (folder / "solo_latency.csv").write_text("model,batch,partition_pct,latency_ms\n" + "\n".join(solo))
    coruns = [
        f"{a},{i},50,{b},{j},{i * (1 + 0.1 * MODELS.index(a) + 0.05 * j * MODELS.index(b))}"
        for a in MODELS
        for i in BATCHES
        for b in MODELS
        for j in BATCHES
    ]
    head = "model,batch,partition_pct,other_model,other_batch,latency_ms\n"
    (folder / "corun_latency_train.csv").write_text(head + "\n".join(coruns))
    return tmp_path


def test_it_compares_active_with_random(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpulet-sampling", "--quick", "--json", "--data", str(data)]) == 0
    printed = capsys.readouterr().out
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert {row["order"] for row in found["rows"]} == {"active", "random"}
    assert {row["measured"] for row in found["rows"]} == {25}  # all that is not held out
    by_order = {row["order"]: row["median_error_pct"] for row in found["rows"]}
    assert by_order["active"] == pytest.approx(by_order["random"])  # the same ones, in another order
    assert found["summary"]["active_needs_all_median"] == 25
    assert found["seeds"] == [1, 2]
    assert "quick: two seeds" in printed
    assert (data / "page.html").read_text().count("<svg") >= 1


@pytest.mark.parametrize("name", ["gpulet-sampling", "gpulet-interference"])
def test_a_table_that_is_not_there_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--data", str(tmp_path)]) == 2
    assert f"{tmp_path / 'mps_measured' / 'solo_latency.csv'}: cannot be read" in capsys.readouterr().err
