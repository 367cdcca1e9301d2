"""Texts in upper and lower case need no locale to be installed where C.UTF-8 has the same tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cotenant.execute.errors import ModelError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy
from onnx_samples import info


def lower(path: Path, locale: str) -> Path:
    """A model that makes texts lower case."""
    node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", locale=locale)
    ends = [info(name, ["rows"], TensorProto.STRING) for name in "xy"]
    graph = helper.make_graph([node], "lower", ends[:1], ends[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_an_english_locale_that_is_not_installed_is_replaced(tmp_path: Path) -> None:
    with SegmentedModel.open(lower(tmp_path / "model.onnx", "en_XX.UTF-8"), cache_dir=tmp_path / "graphs") as model:
        given = np.array(["PUMPE", "ÄÖ ÉΣ I"], object)
        model.prepare([(0, model.unit_count)])
        found = to_numpy(model.run(0, model.unit_count, {"x": given}))["y"]
    assert found.tolist() == ["pumpe", "äö éσ i"]


def test_another_language_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"locale with name:xx_XX\.UTF-8.*locales-all") as caught:
        SegmentedModel.open(lower(tmp_path / "model.onnx", "xx_XX.UTF-8"), cache_dir=tmp_path / "graphs")
    assert "onnxruntime_src" not in str(caught.value)
