"""The base without one of the techniques: all of it can be imported, a model is profiled and served, its tests pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.house import TECHNIQUES
from cotenant.cli.app import OWN
from cotenant.registry import BUILT_IN, COMMANDS, NEEDS
from repositories import write_good

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100
CODE = """
import importlib, pkgutil, sys
from importlib.abc import MetaPathFinder
from pathlib import Path

hidden, root = {hidden!r}, Path({root!r})

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == hidden or name.startswith(hidden + "."):
            raise ModuleNotFoundError(f"{{name}} is hidden", name=name)

sys.meta_path.insert(0, Hidden())
import cotenant
from cotenant import registry
find_spec = registry.find_spec
registry.find_spec = lambda name: None if name == hidden else find_spec(name)

import typer
from cotenant.cli.app import app
print("commands:", *typer.main.get_command(app).commands)

for found in pkgutil.walk_packages(cotenant.__path__, "cotenant."):
    if not found.name.startswith(("cotenant.techniques", "cotenant.cluster", "cotenant.__main__")):
        importlib.import_module(found.name)

import numpy as np
from cotenant.config import DeviceSection, PolicySection, ServerConfig
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.serve.server import Server
from cotenant.wire.client import infer_once

settings = ServerConfig(device=DeviceSection(isolation="thread"), policy=PolicySection("shares"))
profile_repository(root, settings, Effort(0.0, 3, 3, 1), fresh=False, on_step=lambda *_: None)
server = Server(root, settings)
http = HttpServer(server, port=0)
port = http.start()
server.start()
answer = infer_once(f"http://127.0.0.1:{{port}}", "two", {{"x": np.ones((1, 8), np.float32)}})
print(answer["y"].shape)
http.stop()
server.stop()
"""


@pytest.mark.parametrize("technique", [*TECHNIQUES, "cluster"])
def test_a_model_is_profiled_and_served_without(technique: str, tmp_path: Path) -> None:
    hidden = "cotenant.cluster" if technique == "cluster" else f"cotenant.techniques.{technique}"
    assert any(found.startswith(f"{hidden}.") for socket in BUILT_IN.values() for found in socket.values())
    absent = {hidden, *(name for name, needed in NEEDS.items() if hidden in needed)}
    absent |= {name for name, needed in NEEDS.items() if absent & set(needed)}
    code = CODE.format(hidden=hidden, root=str(write_good(tmp_path / "models", "two")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    commands, shape = done.stdout.splitlines()
    assert shape == "(1, 8)"
    left = {name for name, found in BUILT_IN[COMMANDS].items() if not found.startswith(tuple(absent))}
    assert commands.split()[0] == "commands:"
    assert set(commands.split()[1:]) == left | set(OWN)


FAST = ("core", "sim", "world", "repository", "profile", "report")
"""Folders of tests of the base that take seconds and together meet most of it."""


@pytest.mark.parametrize("technique", [*TECHNIQUES, "cluster"])
def test_tests_of_the_base_pass_without_its_folder(technique: str, tmp_path: Path) -> None:
    for each in ("src", "tests", "bench"):
        shutil.copytree(ROOT / each, tmp_path / each, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "src" / "cotenant" / ("cluster" if technique == "cluster" else f"techniques/{technique}")
    shutil.rmtree(package)
    folders = [f"tests/{each}" for each in FAST]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not alone", *folders],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        timeout=SECONDS * 6,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
