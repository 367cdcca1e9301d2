"""Memory in profiles: the peak of a worker after the largest batch, or of the process that measured quickly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cotenant import linux
from cotenant.config import ServerConfig
from cotenant.errors import CotenantError
from cotenant.measure import loader, sweep, worker_memory
from cotenant.measure.load_spec import VersionSpec
from cotenant.measure.loader import load
from cotenant.measure.opened_model import OpenedModel, open_version
from cotenant.measure.solo import QUICK, Effort
from cotenant.measure.worker_memory import worker_peak_bytes
from cotenant.repository import find_versions
from cotenant.work import Share
from repositories import write_good

TINY = Effort(budget_s=0.0, min_runs=3, max_runs=3, warm_up=1)
LANES = (Share((0,)),)
MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_good(tmp_path / "models", "add_sub")


@pytest.fixture
def opened(root: Path) -> Iterator[OpenedModel]:
    made = open_version(root, find_versions(root, "add_sub")[0])
    yield made
    made.runner.close()


def test_the_peak_is_of_a_worker_that_ran_the_largest_batch(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    made = worker_memory.make_inputs

    def make_inputs(inputs: object, shape: object, rows: int, *rest: object) -> object:
        ran.append(rows)
        return made(inputs, shape, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_memory, "make_inputs", make_inputs)
    cuts = (0, opened.runner.unit_count)
    assert worker_peak_bytes(opened, opened.sweep(LANES, QUICK), cuts) > 20 * MIB
    assert ran == [opened.found.config.model.max_batch]
    inputs = made(opened.runner.inputs, opened.shapes[0], 1, True)
    assert all(np.isfinite(each).all() for each in opened.runner.run(0, cuts[-1], inputs).values())  # still open


def test_a_worker_that_cannot_be_measured_costs_no_profile(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert worker_peak_bytes(replace(opened, device="cuda:0"), opened.sweep(LANES, QUICK), (0, 1)) == 0

    def open_executor(*_: object) -> None:
        raise CotenantError("no room")

    monkeypatch.setattr(worker_memory, "open_executor", open_executor)
    assert worker_peak_bytes(opened, opened.sweep(LANES, QUICK), (0, 1)) == 0
    assert "model 'add_sub': the memory of its worker is not measured: no room" in caplog.text


def test_a_full_profile_has_the_larger_peak_of_its_sweeps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [90 * MIB, 70 * MIB]
    monkeypatch.setattr(loader, "worker_peak_bytes", lambda *_: peaks.pop(0))

    def profiled(*partitions: Share) -> int:
        found, errors = sweep.profile_repository(
            root, ServerConfig(), TINY, fresh=False, on_step=lambda *_: None, partitions=partitions
        )
        assert errors == {}
        return found.models["add_sub"].memory_bytes

    assert profiled() == 90 * MIB
    assert profiled() == 90 * MIB
    assert profiled(Share((0, 1))) == 90 * MIB
    assert peaks == []


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_quick_profile_has_the_peak_of_its_process(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    monkeypatch.setattr(linux, "reset_peak", lambda: is_allowed)
    monkeypatch.setattr(linux, "peak_bytes", lambda: 55 * MIB)
    report = load(VersionSpec(str(root), find_versions(root, "add_sub")[0], LANES))
    assert report.profile.memory_bytes == (55 * MIB if is_allowed else 0)
