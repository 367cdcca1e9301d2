"""Lanes that widen in a server: real sessions over several cores, and what is told of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client import Client, Watch, feeds, started
from cotenant.config import DeviceSection, PolicySection
from cotenant.core.actions import Launch
from cotenant.core.events import PredictorChanged
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow
from onnx_samples import residual_cnn
from repositories import config, write_model

MS = 1_000_000
CORES = (LatencyRow(0, 1, 1, 8 * MS), LatencyRow(0, 1, 2, 5 * MS))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_lone_query_runs_on_both_cores_and_gets_the_same_answer(tmp_path: Path, isolation: str) -> None:
    root = tmp_path / "models"
    write_model(root, "cnn", config(slo_ms=10_000), {1: residual_cnn})
    watch = Watch()
    server = started(
        root,
        watch,
        device=DeviceSection(lanes=((0,), (1,)), isolation=isolation),
        policy=PolicySection("edf", {"widen": 2}),
    )
    try:
        client = Client(server)
        tables = server.beliefs.predictor.tables
        assert {row.cores for row in tables["cnn"].rows} == {1, 2}, "both widths were measured"
        x = feeds("cnn")
        results = {}
        for widths, rows in ((2, CORES), (1, CORES[:1])):
            told = {name: replace(table, rows=rows) for name, table in tables.items()}
            server.driver.post(PredictorChanged(TablePredictor(told)))
            watch.seen.clear()
            results[widths] = client.ask("cnn", x)
            assert {launch.share.size for launch in watch.actions(Launch)} == {widths}
        np.testing.assert_allclose(results[2].outputs["y"], results[1].outputs["y"], rtol=1e-4, atol=1e-5)
    finally:
        server.stop()
