"""Factors that a server learnt: kept for its next start, and only for the profile that they correct."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.predict.online import OnlineModel
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.serve.engine.clock import VirtualClock
from cotenant.serve.models.learnt_factors import LearntFactors
from cotenant.work import Work

TABLE = LatencyTable((LatencyRow(0, 1, 1, 10_000_000), LatencyRow(1, 1, 1, 20_000_000)))
OTHER = LatencyTable((LatencyRow(0, 1, 1, 10_000_000), LatencyRow(1, 1, 1, 21_000_000)))


def test_they_are_written_some_time_after_a_change_and_hold_for_the_same_profile(tmp_path: Path) -> None:
    path, clock = tmp_path / "factors.json", VirtualClock()
    learnt = LearntFactors(path, clock)
    assert learnt.of("a", TABLE) == 1.0
    for factor in (2.0, 3.0):
        learnt.note(TablePredictor({"a": TABLE, "b": OTHER}, {"a": {0: factor}, "b": 0.25}))
    assert not path.exists()
    clock.run()
    assert clock.now_ns() == 10_000_000_000
    again = LearntFactors(path, clock)
    assert again.of("a", TABLE) == {0: 3.0}
    assert again.of("b", OTHER) == 0.25
    assert again.of("a", OTHER) == again.of("b", TABLE) == again.of("c", TABLE) == 1.0


def test_a_model_begins_with_what_was_learnt_and_goes_on_from_there() -> None:
    model = OnlineModel(1)
    model.add("a", TABLE, {0: 4.0})
    model.add("b", TABLE)
    latency = [model.predictor.latency_ns(Work("a", shape, 1, 0, 1), 1) for shape in (0, 1)]
    assert latency == [40_000_000, 20_000_000]
    assert model.predictor.scales == {"a": {0: 4.0}}
    assert model._calibration.observe("a", 40_000_000, 40_000_000, shape=0) is None
    model.add("a", TABLE)
    assert model.predictor.scales == {}


def test_a_file_that_cannot_be_read_or_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "factors.json"
    path.write_text("{}", encoding="utf-8")
    learnt = LearntFactors(path, VirtualClock())
    assert "factors.json: format is None" in caplog.text
    learnt.note(TablePredictor({"a": TABLE}, {"a": 2.0}))
    learnt.save()
    assert LearntFactors(path, VirtualClock()).of("a", TABLE) == 2.0
    path.unlink()
    path.mkdir()
    learnt.note(TablePredictor({"a": TABLE}, {"a": 3.0}))
    learnt.save()
    assert "are not kept for the next start" in caplog.text
