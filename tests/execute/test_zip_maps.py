"""Classifiers as scikit-learn and LightGBM exporters write them by default are served with tensors of probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy
from cotenant.graph.rewrite.zip_maps import drop_zip_maps
from onnx_samples import info
from repositories import add_sub

LABELS = {"ints": {"classlabels_int64s": [3, 5, 8]}, "texts": {"classlabels_strings": ["a", "b", "c"]}}


def classifier(labels: str, *, reads_twice: bool = False) -> onnx.ModelProto:
    """Three classes of four features: a label, and a sequence of maps from class to probability."""
    given = LABELS[labels]
    ints = labels == "ints"
    linear = {"classlabels_ints" if ints else "classlabels_strings": next(iter(given.values()))}
    nodes = [
        helper.make_node(
            "LinearClassifier",
            ["x"],
            ["label", "scores"],
            domain="ai.onnx.ml",
            coefficients=[0.1 * at for at in range(12)],
            intercepts=[0.0, 0.1, 0.2],
            post_transform="SOFTMAX",
            **linear,
        ),
        helper.make_node("ZipMap", ["scores"], ["probabilities"], domain="ai.onnx.ml", **given),
    ]
    key = TensorProto.INT64 if ints else TensorProto.STRING
    value = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(key, value))
    outputs = [info("label", ["batch"], key), onnx.ValueInfoProto(name="probabilities", type=maps)]
    if reads_twice:
        nodes.append(helper.make_node("Relu", ["scores"], ["more"]))
        outputs.append(info("more", ["batch", 3]))
    graph = helper.make_graph(nodes, "classifier", [info("x", ["batch", 4])], outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("reads_twice", [False, True])
@pytest.mark.parametrize("labels", LABELS)
def test_maps_become_a_tensor_with_the_same_numbers(tmp_path: Path, labels: str, reads_twice: bool) -> None:
    import onnxruntime

    path = tmp_path / "model.onnx"
    onnx.save(classifier(labels, reads_twice=reads_twice), path)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    label, maps = plain.run(["label", "probabilities"], {"x": x})
    with SegmentedModel.open(path, cache_dir=tmp_path / "graphs") as model:
        assert [(each.name, each.dtype) for each in model.outputs][1] == ("probabilities", "tensor(float)")
        found = to_numpy(model.run(0, model.unit_count, {"x": x}))
    assert found["label"].tolist() == list(label)
    np.testing.assert_allclose(found["probabilities"], [list(row.values()) for row in maps], rtol=1e-6)


def test_other_models_are_left_as_they_are() -> None:
    model = add_sub()
    before = model.SerializeToString()
    assert drop_zip_maps(model) == ()
    assert model.SerializeToString() == before
