"""The benchmark of first use: files as exporters write them, answers compared with references, and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench._newcomer_models import KINDS, Case
from bench.newcomer import fault_of, own_models, restart, summary_of

NAMES = ("iris", "forest", "lightgbm", "tfidf", "table")


def installed(*names: str) -> None:
    for name in names:
        if missing := KINDS[name].missing():
            pytest.skip(f"{name} needs {', '.join(missing)}")


def test_bare_files_of_tables_and_texts_are_served_with_the_outputs_of_their_framework() -> None:
    installed(*NAMES)
    rows = own_models(NAMES)
    assert {row["model"]: row["problem"] for row in rows} == dict.fromkeys(NAMES, "")
    assert summary_of(rows)["own_models_ready_of_13"] == len(NAMES)


@pytest.mark.parametrize("name", ["body_detector", "text_reader", "text_detector", "pitch_finder"])
def test_nets_have_the_declared_shapes(name: str, tmp_path: Path) -> None:
    import onnxruntime

    case = KINDS[name].make(name, tmp_path)
    declared = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"]).get_outputs()
    for info, output in zip(declared, case.outputs, strict=True):
        assert len(info.shape) == output.ndim
        assert all(dim == had for dim, had in zip(info.shape, output.shape, strict=True) if isinstance(dim, int))
        assert np.isfinite(output).all()
        assert output.std() > 0


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ([[0.5, 0.5], [0.1, 0.9]], ""),
        ([[0.5, 0.5]], "output 'p' has the shape [1, 2], expected [2, 2]"),
        ([[0.5, 0.5], [0.9, 0.1]], "output 'p' differs from its reference"),
    ],
)
def test_answers_are_compared_with_the_reference(values: list[list[float]], fault: str) -> None:
    case = Case({}, (np.array(["a", "b"], object), np.array([[0.5, 0.5], [0.1, 0.9]])))
    answer: dict[str, Any] = {"outputs": {"label": {"values": ["a", "b"]}, "p": {"values": values}}}
    assert fault_of(answer, case) == fault
    assert fault_of({"outputs": {"p": {"values": values}}}, case) == "it answers 1 outputs, expected 2"


def test_a_figure_without_its_rows_is_left_out() -> None:
    rows = [
        {"what": "first answer", "problem": "", "seconds": 3.0},
        {"what": "first answer", "problem": "skipped"},
        {"what": "own model", "problem": "it is UNAVAILABLE"},
        {"what": "start of 8 models", "problem": "skipped"},
        {"what": "restart", "problem": "", "refused": 4},
    ]
    assert summary_of(rows) == {"edited_files": 0, "own_models_ready_of_13": 0, "restart_refused": 4}
    assert summary_of([rows[0]])["seconds_to_first_answer"] == 3.0


def test_queries_go_on_after_a_restart() -> None:
    row = restart(0.3)
    assert 0 <= row["refused"] == sum(row["by"].values()) < row["sent"]
