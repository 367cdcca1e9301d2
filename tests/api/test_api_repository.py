"""`cotenant.Repository` and `cotenant.profile`, and results as tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import cotenant
from cotenant.errors import ConfigError, CotenantError
from cotenant.metrics import QueryRecord, summarise
from cotenant.tabular import MissingPackageError
from cotenant.types import Outcome
from repositories import BAD, write_good, write_model


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> cotenant.Repository:
    return cotenant.Repository(write_good(tmp_path_factory.mktemp("api") / "models", "add_sub", "two"))


def test_a_repository_is_read(repository: cotenant.Repository) -> None:
    assert repository.models == ("add_sub", "two")
    assert repository.applications == ()
    assert repository.config("two").model.max_batch == 4
    assert repository.settings.server.http_port == 8000
    assert str(repository.path) in repr(repository)
    with pytest.raises(ConfigError, match="'three'"):
        repository.config("three")


def test_a_repository_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        cotenant.Repository(tmp_path / "none")


def test_a_profile_is_measured_once_and_kept(repository: cotenant.Repository) -> None:
    steps: list[tuple[int, int, str]] = []
    found = cotenant.profile(repository, budget_s=0.0, on_step=lambda *step: steps.append(step))
    assert steps[-1][0] == steps[-1][1] > 0
    assert repository.profile == found
    again: list[tuple[int, int, str]] = []
    cotenant.profile(str(repository.path), budget_s=0.0, on_step=lambda *step: again.append(step))
    assert again[-1] == (0, 0, "")
    assert {done for done, _, _ in again} == {0}
    rows = found.rows()
    assert {row["model"] for row in rows} == {"add_sub", "Owner of two", "Owner of two:1"}
    assert all(row["p50_ms"] <= row["upper_ms"] for row in rows)
    assert found._repr_html_().count("<tr>") == 1 + len(rows)


def test_models_that_cannot_be_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, versions, _ = BAD["no_slo"]
    write_model(tmp_path / "models", "no_slo", text, versions)
    with pytest.raises(CotenantError, match="no model could be measured"):
        cotenant.profile(tmp_path / "models", budget_s=0.0)
    assert "'no_slo' is not in the profile" in caplog.text


SUMMARY = summarise([QueryRecord(name, 0, 5_000_000, Outcome.ANSWERED) for name in ("a", "<b>")], end_ns=1_000_000_000)


def test_rows_of_a_summary() -> None:
    assert [(row["tenant"], row["answered"], row["p50_ms"]) for row in SUMMARY.rows()] == [
        *(("a", 1, 5.0), ("<b>", 1, 5.0), ("total", 2, 5.0))
    ]
    assert "<td>&lt;b&gt;</td>" in SUMMARY._repr_html_()


def test_a_summary_as_a_frame() -> None:
    pytest.importorskip("pandas")
    frame = SUMMARY.to_pandas()
    assert list(frame.tenant) == ["a", "<b>", "total"]
    assert list(frame.columns) == list(SUMMARY.rows()[0])


def test_a_frame_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match=r"Summary\.to_pandas needs pandas: pip install pandas"):
        SUMMARY.to_pandas()
