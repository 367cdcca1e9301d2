"""Classifiers of scikit-learn and LightGBM as they are exported by default: probabilities in maps, one a row."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

_DOMAIN = "ai.onnx.ml"


def drop_zip_maps(model: onnx.ModelProto) -> tuple[str, ...]:
    """Make outputs that are sequences of maps to tensors [rows, classes], in place; the names of these outputs.

    The operator `ZipMap` turns a row of probabilities into a map from class to probability, which no inference
    protocol carries. The classes stand in the order of the operator's labels.
    """
    outputs = {output.name: output for output in model.graph.output}
    dropped = []
    for node in model.graph.node:
        if node.op_type == "ZipMap" and node.domain == _DOMAIN and node.output[0] in outputs:
            name = node.output[0]
            classes = next((len(each.strings) or len(each.ints) for each in node.attribute), 0)
            outputs[name].CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, classes or None]))
            node.CopyFrom(helper.make_node("Identity", node.input, [name], node.name))
            dropped.append(name)
    return tuple(dropped)
