"""Formats of other packages: opened, profiled and served like our own, in threads and in worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from client import Client
from cotenant.config import DeviceSection, ServerConfig
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.execute.errors import ModelError
from cotenant.execute.open_model import open_model
from cotenant.measure.solo import QUICK
from cotenant.measure.sweep import profile_repository
from cotenant.repository import find_versions
from cotenant.repository import formats as formats_module
from cotenant.repository.formats import FORMATS, Format, formats, register
from cotenant.serve.server import Server
from cotenant.types import Outcome

HERE = Path(__file__).parent
CORE = (min(os.sched_getaffinity(0)),)
X = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package `null_format`, as an installation leaves it, here and in the processes that are started."""
    folder = tmp_path / "site"
    info = folder / "null_format-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "null_format.py").write_text((HERE / "null_format.py").read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: null-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cotenant.formats]\nnull = null_format:NULL\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    before = dict(FORMATS)
    formats_module._join.cache_clear()
    yield
    FORMATS.clear()
    FORMATS.update(before)
    formats_module._join.cache_clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "idle"
    (model / "1").mkdir(parents=True)
    (model / "config.toml").write_text(
        "[tenant]\nslo_ms = 5000\n[model]\nmax_batch = 2\n[[model.shapes]]\nx = [1, 4]\n"
    )
    (model / "1" / "model.null").write_text("1.5")
    return model.parent


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_format_of_another_package_is_profiled_and_served(root: Path, isolation: str) -> None:
    device = DeviceSection(cores=CORE, isolation=isolation)
    profile, errors = profile_repository(root, ServerConfig(device=device), QUICK, fresh=True, on_step=lambda *_: None)
    assert errors == {}
    assert min(point.p50_ns for point in profile.models["idle"].points) > 1_500_000
    server = Server(root, ServerConfig(device=device))
    server.start()
    try:
        result = Client(server).ask("idle", X)
        assert result.outcome is Outcome.ANSWERED, result.reason
        assert np.array_equal(result.outputs["y"], X["x"])
        assert server.config("idle", "")["backend"] == "null"
    finally:
        server.stop()


@pytest.mark.usefixtures("installed")
def test_it_is_found_beside_ours_and_no_two_are(root: Path) -> None:
    [found] = find_versions(root, "idle")
    assert found.path.name == "model.null"
    assert [*formats()] == [".onnx", ".pt2", ".null"]
    with pytest.raises(ModelError, match=r"null_format runs it only on cpu. Export it as .pt2 for cuda:0"):
        open_model(found.path, device="cuda:0")
    (root / "idle" / "1" / "model.onnx").write_text("")
    with pytest.raises(ConfigError, match=r"has model.onnx and model.null, expected one of them"):
        find_versions(root, "idle")
    register(FORMATS[".null"])
    with pytest.raises(InvalidValueError, match=r"suffix is '.null', expected one that no other format has"):
        register(Format(".null", "other", "other:open", "other", "other"))


def test_what_is_not_installed_is_named(root: Path) -> None:
    with pytest.raises(ModelError, match=r"no engine runs files that end in '.null'. Give one of .onnx, .pt2"):
        open_model(root / "idle" / "1" / "model.null")
    missing = Format(".gone", "a_package_that_is_not_there", "gone:open", "gone", "gone", "pip install gone")
    FORMATS[".gone"] = missing
    try:
        with pytest.raises(ModelError, match=r"needs a_package_that_is_not_there, which is not installed. Run: pip"):
            open_model(root / "model.gone")
    finally:
        del FORMATS[".gone"]
