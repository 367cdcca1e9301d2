"""Small models that made-up values do not suit: they never end, refuse, or take too much memory."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnx_samples import Sketch, info

STOP = 3


def without_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with inputs and outputs of unknown rank."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    return model


def looping(shape: list[int | str | None] | None = None) -> onnx.ModelProto:
    """x times 2, after a loop that ends only when the largest of x is STOP. x has an unknown rank by default."""
    body = helper.make_graph(
        [helper.make_node("Not", ["is_stop"], ["go_on"]), helper.make_node("Identity", ["state"], ["next"])],
        "body",
        [
            info("turn", [], TensorProto.INT64),
            info("before", [], TensorProto.BOOL),
            info("state", None, TensorProto.INT64),
        ],
        [info("go_on", [], TensorProto.BOOL), info("next", None, TensorProto.INT64)],
    )
    s = Sketch()
    largest = s.op("ReduceMax", "x", keepdims=0)
    s.op("Equal", largest, s.constant(np.array(STOP)), out="is_stop")
    start = s.op("Not", "is_stop")
    looped = s.op("Loop", "", start, "x", body=body)
    s.op("Mul", looped, s.constant(np.array(2)), out="y")
    made = s.model([info("x", shape or [None], TensorProto.INT64)], [info("y", shape or [None], TensorProto.INT64)])
    return made if shape else without_shapes(made)


def number_of_text(first: str | int = 2) -> onnx.ModelProto:
    """The numbers that texts stand for: "text" stands for none."""
    s = Sketch()
    s.op("Cast", "words", out="y", to=TensorProto.FLOAT)
    return s.model([info("words", [first], TensorProto.STRING)], [info("y", [first])])


def one_row() -> onnx.ModelProto:
    """The row of a table that has one row: index 1 is outside."""
    s = Sketch()
    s.op("Gather", s.constant(np.array([[5.0, 7.0]], np.float32)), "index", out="y", axis=0)
    return s.model([info("index", ["batch"], TensorProto.INT64)], [info("y", ["batch", 2])])


def hungry() -> onnx.ModelProto:
    """A sum over 200 million copies of a number: 800 MB for a moment."""
    s = Sketch()
    many = s.op("Expand", "x", s.constant(np.array([200_000_000])))
    s.op("ReduceSum", s.op("Sqrt", s.op("Abs", many)), out="y", keepdims=1)
    return s.model([info("x", [1])], [info("y", [1])])


def unranked() -> onnx.ModelProto:
    """Twice a tensor of any rank."""
    s = Sketch()
    s.op("Add", "x", "x", out="y")
    return without_shapes(s.model([info("x", [None])], [info("y", [None])]))


def columns(count: int) -> onnx.ModelProto:
    """The sum of so many inputs."""
    s = Sketch()
    names = [f"column_{number}" for number in range(count)]
    s.op("Sum", *names, out="y")
    return s.model([info(name, [1, 1]) for name in names], [info("y", [1, 1])])


def deep(rank: int) -> onnx.ModelProto:
    """Twice a tensor of one element with so many dimensions."""
    s = Sketch()
    s.op("Add", "x", "x", out="y")
    return s.model([info("x", [1] * rank)], [info("y", [1] * rank)])
