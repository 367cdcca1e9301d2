"""The example of applications, on real models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "application.py"


@pytest.mark.models
def test_the_example_serves_two_applications_of_quick_start_models() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True, timeout=240)
    upright, turned, silence, line, hear = done.stdout.splitlines()
    assert upright == "a line of text, upright: 'One request'"
    assert turned.startswith("a line of text, upside down: ")
    assert silence == "speech in two chunks of silence: no, no"
    assert line == "line: {'answered': 2}"
    assert hear == "hear: {'answered': 1}"
