"""Merged answers are checked while serving: a model whose rows act on each other is found out and runs alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench._mixing import drawn
from client import Client, Watch, assert_balanced, sample, until
from cotenant.config import DeviceSection, IntegritySection, ServerConfig
from cotenant.core.actions import Launch
from cotenant.core.events import TenantResumed, TenantSuspended
from cotenant.measure import opened_model
from cotenant.measure.merging_trial import is_same_answer
from cotenant.serve.frontend.http_control import OF_MODEL
from cotenant.serve.frontend.http_routes import Endpoint, HttpRoute
from cotenant.serve.server import Server
from cotenant.wire.api import InferResult
from repositories import config, scaled, write_model

MIXING, FINE = drawn("mean over rows", 1), "fine"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    opened_model._verdicts.clear()
    root = tmp_path / "models"
    write_model(root, "mixing", config(max_batch=8) + 'batching = "trust"\n', {1: lambda: MIXING.model})
    write_model(root, FINE, config(max_batch=8), {1: lambda: scaled(2.0)})
    yield root
    opened_model._verdicts.clear()


@contextmanager
def serving(root: Path, sample: int, watch: Watch, isolation: str = "thread") -> Iterator[Server]:
    device = DeviceSection(cores=(0,), isolation=isolation)
    server = Server(root, ServerConfig(device=device, integrity=IntegritySection(sample=sample)))
    server.start(watch)
    try:
        yield server
    finally:
        server.stop()


def ask_together(server: Server, model: str, seed: int, count: int = 4) -> list[tuple[Any, InferResult]]:
    """Queries that wait at one time, and so run as one batch where they may: what each sent and got."""
    client, rng = Client(server), np.random.default_rng(seed)
    shape = MIXING.shape["x"] if model == "mixing" else (1, 8)
    inputs = [rng.standard_normal(shape).astype(np.float32) * (1 + at) for at in range(count)]
    server.driver.post(TenantSuspended(model, "to wait"))
    numbers = [client.submit(model, {"x": each}) for each in inputs]
    server.driver.post(TenantResumed(model))
    return list(zip(inputs, client.wait(*numbers), strict=True))


def alone(server: Server, inputs: Any) -> Any:
    return Client(server).ask("mixing", {"x": inputs}).outputs


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_whose_rows_act_on_each_other_is_found_out(
    root: Path, caplog: pytest.LogCaptureFixture, isolation: str
) -> None:
    watch, asked = Watch(), [0]
    with serving(root, 1, watch, isolation) as server:
        served = server.names.models["mixing"][""]
        assert served.merges

        def step() -> None:
            asked[0] += len(ask_together(server, "mixing", asked[0]))

        with caplog.at_level("WARNING"):
            until(
                lambda: (
                    "model 'mixing': merging is off, its queries run alone from now on: 2 of the last" in caplog.text
                ),
                step,
            )
        assert not served.merges
        server.driver.wait_idle(10)
        assert server.counters.by_tenant["mixing"].arrived == asked[0], "checks are nobody's queries"
        assert_balanced(server)
        for inputs, result in ask_together(server, "mixing", 99):
            assert is_same_answer(alone(server, inputs), result.outputs), "answers depend on their own request alone"
        page = server.metrics().decode()
        assert sample(page, "cotenant_merge_checks_total", tenant="mixing", result="different") >= 2
        route = HttpRoute(Endpoint.MODEL, "mixing")
        told = json.loads(bytes(OF_MODEL[Endpoint.MODEL](server, route, b"").body))["parameters"]["merging"]
        assert told.startswith("refused: 2 of the last")
        assert server.config("mixing", "")["parameters"]["merging"]["string_value"] == told
        server.load("mixing")
        assert not server.names.models["mixing"][""].merges, "the process remembers"


def test_a_model_that_keeps_rows_apart_is_checked_and_stays_merged(root: Path) -> None:
    watch = Watch()
    with serving(root, 3, watch) as server:
        until(
            lambda: sum(server._checks.results.get(FINE, {}).values()) >= 3,
            lambda: ask_together(server, FINE, 0),
        )
        assert set(server._checks.results[FINE]) == {"same"}
        assert server.names.models[FINE][""].merges
        assert max(len(launch.queries) for launch in watch.actions(Launch)) > 1


def test_nothing_is_checked_without_a_sample(root: Path) -> None:
    watch = Watch()
    with serving(root, 0, watch) as server:
        for seed in range(5):
            ask_together(server, "mixing", seed)
        assert server._checks.results == {}
        assert server.names.models["mixing"][""].merges


def test_one_answer_in_so_many_is_picked(root: Path) -> None:
    watch = Watch()
    with serving(root, 10, watch) as server:
        for seed in range(8):
            ask_together(server, FINE, seed)
            server.driver.wait_idle(10)
            server._checks._compares.submit(lambda: None).result(10)
        merged = sum(len(each.queries) for each in watch.actions(Launch) if len(each.queries) > 1)
        assert sum(server._checks.results[FINE].values()) == merged // 10
