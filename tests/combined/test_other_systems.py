"""On macOS and Windows all works but what serves, which says that it needs Linux. What they lack is hidden here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cotenant
from repositories import write_good

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 110
TENANTS = '[[device]]\nname = "cpu"\ncount = 2\ncores = 1\n\n[[tenant]]\nname = "add_sub"\nrate = 5\nslo_ms = 20000\n'
WORKLOAD = 'seed = 3\nduration_s = 2.0\n\n[[tenant]]\nmodel = "two"\nrate = 30.0\n'
WORKS = (
    *("models", "init", "profile", "simulate", "explain", "lost", "replay", "bound", "plan", "check", "devices"),
    *("infer", "load"),
)


@pytest.mark.parametrize(("system", "name"), [("darwin", "Darwin"), ("win32", "Windows")])
def test_all_works_but_what_serves(system: str, name: str, tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "two", "add_sub")
    (root / "cotenant.toml").write_text("[device]\ncores = [0]\n")
    (tmp_path / "bare.onnx").write_bytes((root / "two" / "1" / "model.onnx").read_bytes())
    (tmp_path / "workload.toml").write_text(WORKLOAD)
    (tmp_path / "tenants.toml").write_text(TENANTS)
    done = subprocess.run(
        [sys.executable, SUPPORT / "other_system.py", system, SUPPORT / "portable_commands.py", tmp_path],
        env={**os.environ, "PYTHONPATH": str(Path(cotenant.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["modules"] == "all"
    assert {step: said[step] for step in WORKS if not said[step].startswith("0 ")} == {}
    needs = f"needs Linux, and this is {name}"
    for step in ("serve", "compile"):
        assert said[step].startswith(f"2 cotenant: cotenant {step} {needs}"), said[step]
    assert f"cotenant profile --contention {needs}" in said["contention"]
    assert f"cotenant.Server {needs}" in said["api server"]
    assert f'"{name}: no serving here"' in said["doctor"]
    assert (said["api simulate"], said["api plan"], said["api models"]) == ("True", "True", "add_sub two")
