"""onnxruntime writes nothing about its use, in the server or in what the server starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def _written(home: Path, code: str) -> list[str]:
    home.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_onnxruntime_leaves_nothing_behind_once_cotenant_is_imported(tmp_path: Path) -> None:
    assert _written(tmp_path / "home", "import cotenant, onnxruntime") == []


def test_a_process_started_from_there_leaves_nothing_either(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import onnxruntime'], check=True)"
    assert _written(tmp_path / "home", f"import cotenant\n{child}") == []
