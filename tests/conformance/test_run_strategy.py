"""Run strategies of other packages: models run as they say, in threads and in worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from client import Client
from cotenant import registry
from cotenant.config import DeviceSection, ServerConfig
from cotenant.execute.strategy import strategies
from cotenant.measure.opened_model import open_version
from cotenant.repository import find_versions
from cotenant.repository import formats as formats_module
from cotenant.repository.formats import FORMATS
from cotenant.serve.server import Server
from cotenant.types import Outcome

HERE = Path(__file__).parent
CORE = (min(os.sched_getaffinity(0)),)
X = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages of a format and of a strategy, as installations leave them, here and in processes of the server."""
    folder = tmp_path / "site"
    for name, group, entry in (
        ("null_format", "cotenant.formats", "null = null_format:NULL"),
        ("adding_strategy", "cotenant.run_strategies", "adding = adding_strategy:Adding"),
    ):
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text((HERE / f"{name}.py").read_text())
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    before = dict(FORMATS)
    formats_module._join.cache_clear()
    strategies.cache_clear()
    yield
    FORMATS.clear()
    FORMATS.update(before)
    formats_module._join.cache_clear()
    strategies.cache_clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "idle"
    (model / "1").mkdir(parents=True)
    text = "[tenant]\nslo_ms = 5000\n[model]\nmax_batch = 2\n[[model.shapes]]\nx = [1, 4]\n"
    (model / "config.toml").write_text(text)
    (model / "1" / "model.null").write_text("0.5")
    return model.parent


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_runs_as_a_strategy_of_another_package_says(root: Path, isolation: str) -> None:
    server = Server(root, ServerConfig(device=DeviceSection(cores=CORE, isolation=isolation)))
    server.start()
    try:
        result = Client(server).ask("idle", X)
        assert result.outcome is Outcome.ANSWERED, result.reason
        np.testing.assert_array_equal(result.outputs["y"], X["x"] + 3)
        parameters = server.config("idle", "")["parameters"]
        assert parameters["on_1_cores"]["string_value"] == "by adding: 0.50 of the time of a sequential run"
    finally:
        server.stop()


@pytest.mark.usefixtures("installed")
def test_strategies_have_an_order_and_a_profile_is_of_what_is_followed(root: Path) -> None:
    assert [*strategies()] == [*registry.built_in(registry.RUN_STRATEGIES), "adding"]
    [found] = find_versions(root, "idle")
    with open_version(root, found).runner as model:
        np.testing.assert_array_equal(model.run(0, 1, X)["y"], X["x"] + 3)
    with open_version(root, found, placed=False).runner as model:
        np.testing.assert_array_equal(model.run(0, 1, X)["y"], X["x"])
    digests = {open_version(root, found, placed=placed).digest for placed in (True, False)}
    assert len(digests) == 2
