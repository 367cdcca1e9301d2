"""The page on the Python API: its example runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cotenant

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "simulated: 1.0",
        *(f"{way}: [[0. 2. 0. 4.]]" for way in ("in process", "over HTTP")),
    ]


def test_every_name_is_on_the_page() -> None:
    assert [name for name in cotenant.__all__ if f"`{name}" not in PAGE] == []
