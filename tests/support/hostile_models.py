"""Models that attack the process that loads them: they expand, nest, never end, or lie about their files."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnx_samples import OPSET, Sketch, info

DEPTH = 22


def expanding_constant() -> onnx.ModelProto:
    """x and the sum of a constant of 8 GB that is given by its shape."""
    s = Sketch()
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    many = s.op("ConstantOfShape", s.constant(np.array([2_000_000_000])), value=one)
    s.op("Add", "x", s.op("ReduceSum", s.op("Sqrt", many), keepdims=1), out="y")
    return s.model([info("x", [1])], [info("y", [1])])


def nested_functions(depth: int = DEPTH) -> onnx.ModelProto:
    """x doubled 2**depth times: each of so many functions calls the one below it twice."""
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("own", 1)]
    functions = [helper.make_function("own", "f0", ["x"], ["y"], [helper.make_node("Add", ["x", "x"], ["y"])], opsets)]
    for level in range(1, depth + 1):
        below = f"f{level - 1}"
        nodes = [
            helper.make_node(below, ["x"], ["m"], domain="own"),
            helper.make_node(below, ["m"], ["y"], domain="own"),
        ]
        functions.append(helper.make_function("own", f"f{level}", ["x"], ["y"], nodes, opsets))
    graph = helper.make_graph(
        [helper.make_node(f"f{depth}", ["x"], ["y"], domain="own")], "g", [info("x", [1])], [info("y", [1])]
    )
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=8)


def nested_branches(depth: int) -> onnx.ModelProto:
    """A branch in a branch, so many deep."""
    inner = [helper.make_node("Identity", ["x"], ["b0"])]
    for level in range(1, depth + 1):
        then = helper.make_graph(inner, f"then{level}", [], [info(f"b{level - 1}", [1])])
        other = helper.make_graph([helper.make_node("Neg", ["x"], ["n"])], f"else{level}", [], [info("n", [1])])
        inner = [helper.make_node("If", ["is_so"], [f"b{level}"], then_branch=then, else_branch=other)]
    inputs = [info("x", [1]), info("is_so", [], TensorProto.BOOL)]
    graph = helper.make_graph(inner, "g", inputs, [info(f"b{depth}", [1])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
