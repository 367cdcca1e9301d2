"""Guaranteed rates above the machine: an error of `cotenant models`, and a line and a figure of a server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from commands import Run
from cotenant.config import ServerConfig
from cotenant.core.engine import Engine
from cotenant.core.events import TenantAdded, TenantRemoved
from cotenant.execute.protocol import WorkerStatus
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.policies import policy_class
from cotenant.serve.engine.clock import VirtualClock
from cotenant.serve.engine.driver import Driver
from cotenant.serve.engine.queries import EngineFigures, figures_of
from cotenant.serve.metrics_page import MetricsPage
from cotenant.types import Tenant
from cotenant.work import Machine
from cotenant.world.simulated import SimulatedExecutor, TableWorld
from repositories import write_good
from scenario import CORES, MS, TWO_LANES, tables


class Idle:
    """What the page asks of an executor."""

    def workers(self) -> tuple[WorkerStatus, ...]:
        return ()

    def launch_counts(self) -> dict[str, int]:
        return {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_good(tmp_path_factory.mktemp("rates") / "models", "add_sub", "two")
    profile_repository(root, ServerConfig(), Effort(0.0, 3, 3, 1), fresh=False, on_step=lambda *_: None)
    return root


def with_rate(root: Path, folder: Path, rate: float) -> Path:
    copy = shutil.copytree(root, folder / "models")
    path = copy / "add_sub" / "config.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("slo_ms =", f"rate = {rate}\nslo_ms =", 1), encoding="utf-8")
    assert "rate =" in path.read_text(encoding="utf-8")
    return copy


@pytest.mark.parametrize(("rate", "fits"), [(0.001, True), (1e9, False)])
def test_rates_above_the_lanes_are_an_error(run: Run, root: Path, tmp_path: Path, rate: float, fits: bool) -> None:
    made = with_rate(root, tmp_path, rate)
    status, out, _ = run("models", made, "--json")
    assert (status, json.loads(out)["rates_error"] == "") == (0 if fits else 1, fits)
    status, out, _ = run("models", made)
    assert ("the guaranteed rates (tenant.rate) need" in out) is not fits


def test_a_server_logs_one_line_and_keeps_a_figure(caplog: pytest.LogCaptureFixture) -> None:
    """Of two lanes tenant `a` is guaranteed one and a half; with `b` they are three."""
    predictor = tables({"a": 10 * MS, "b": 10 * MS})
    engine = Engine(
        [Tenant("a", 100 * MS, rate=150.0)], policy_class("shares")(TWO_LANES), predictor, Machine.cpu(CORES)
    )
    clock = VirtualClock()
    executor = SimulatedExecutor(TableWorld(predictor), clock)
    driver = Driver(engine, executor, clock)
    page = MetricsPage({}, dict, Idle(), engine=lambda: figures_of(driver))
    assert b"cotenant_guaranteed_rates_ratio 0.75" in page.render()
    with caplog.at_level("INFO", logger="cotenant.driver"):
        driver.post(TenantAdded(Tenant("b", 100 * MS, rate=150.0)))
        driver.post(TenantAdded(Tenant("c", 100 * MS)))
    [line] = [record.message for record in caplog.records if "guaranteed rates" in record.message]
    assert "need 1.50 times the capacity of all lanes: each tenant gets 67 % of its rate" in line
    assert b"cotenant_guaranteed_rates_ratio 1.5" in page.render()
    with caplog.at_level("INFO", logger="cotenant.driver"):
        driver.post(TenantRemoved("b", "the model was unloaded"))
    assert caplog.records[-1].message == "the guaranteed rates (tenant.rate) fit the lanes again"
    assert figures_of(None) == EngineFigures()
