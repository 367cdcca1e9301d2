"""Small ONNX models for tests: each function returns a checked `ModelProto`; `feeds` makes inputs for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, checker, helper, numpy_helper

OPSET = 17
Array = np.ndarray[Any, np.dtype[Any]]


class Sketch:
    """Collects nodes and weights; every method returns the name of what it made."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, *shape: int, name: str = "") -> str:
        return self.constant(self.rng.standard_normal(shape).astype(np.float32) * 0.3, name)

    def constant(self, value: Any, name: str = "") -> str:
        name = name or f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def op(self, op_type: str, *inputs: str, out: str = "", outputs: Sequence[str] = (), **attributes: Any) -> str:
        names = list(outputs) or [out or f"t{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, **attributes))
        return names[0]

    def conv(self, x: str, inner: int, outer: int, kernel: int = 3, **attributes: Any) -> str:
        pads = [kernel // 2] * 4
        return self.op(
            "Conv", x, self.weight(outer, inner, kernel, kernel), self.weight(outer), pads=pads, **attributes
        )

    def model(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "sample", inputs, outputs, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        checker.check_model(model)
        return model


def info(name: str, shape: Sequence[int | str | None] | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def feeds(model: onnx.ModelProto, seed: int = 0, dim: int = 2) -> dict[str, Array]:
    """Random inputs; dynamic dimensions get size `dim`."""
    rng = np.random.default_rng(seed)
    constants = {init.name for init in model.graph.initializer}
    made: dict[str, Array] = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [d.dim_value or dim for d in value.type.tensor_type.shape.dim]
        made[value.name] = np.asarray(rng.standard_normal(shape) * 2).astype(kind)
    return made


def picky() -> onnx.ModelProto:
    """Rows of a table, chosen by an index: an index outside of it raises at run time."""
    s = Sketch(3)
    s.constant(np.arange(20, dtype=np.float32).reshape(10, 2), "table")
    s.op("Gather", "table", "index", out="y", axis=0)
    return s.model([info("index", ["batch"], onnx.TensorProto.INT64)], [info("y", ["batch", 2])])


def residual_cnn() -> onnx.ModelProto:
    """Convolutions with a residual, a branch, pooling and a classifier; dynamic batch, channels that block."""
    s = Sketch()
    x = s.op("Relu", s.conv("x", 3, 16))
    for _ in range(2):
        y = s.op("Relu", s.conv(x, 16, 16))
        x = s.op("Relu", s.op("Add", s.conv(y, 16, 16), x))
    branches = [s.conv(x, 16, 16, 1), s.op("Relu", s.conv(x, 16, 16)), s.op("Sigmoid", s.conv(x, 16, 16, 5))]
    x = s.op("Concat", *branches, axis=1)
    x = s.op("Flatten", s.op("GlobalAveragePool", s.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])))
    s.op("Gemm", x, s.weight(48, 7), s.weight(7), out="y")
    return s.model([info("x", ["batch", 3, 16, 16])], [info("y", ["batch", 7])])


def encoder(layers: int = 2, hidden: int = 16) -> onnx.ModelProto:
    """A transformer encoder with an attention mask that is live all along; dynamic batch and length."""
    s = Sketch()
    scale, one, root, half = (s.constant(np.float32(v)) for v in (4.0, 1.0, 2**0.5, 0.5))
    heads = s.constant(np.array([0, -1, 2, hidden // 2]))
    flat = s.constant(np.array([0, -1, hidden]))
    mask = s.op("Unsqueeze", s.op("Cast", "mask", to=TensorProto.FLOAT), s.constant(np.array([1, 2])))
    mask = s.op("Mul", s.op("Sub", one, mask), s.constant(np.float32(-1e3)))
    x = s.op("Gather", s.weight(50, hidden), "ids")

    def norm(value: str) -> str:
        return s.op("LayerNormalization", value, s.constant(np.ones(hidden, np.float32)), s.weight(hidden), axis=-1)

    def linear(value: str, inner: int, outer: int) -> str:
        return s.op("Add", s.op("MatMul", value, s.weight(inner, outer)), s.weight(outer))

    for _ in range(layers):
        q, k, v = (s.op("Reshape", linear(x, hidden, hidden), heads) for _ in range(3))
        q, v = (s.op("Transpose", value, perm=[0, 2, 1, 3]) for value in (q, v))
        scores = s.op("Div", s.op("MatMul", q, s.op("Transpose", k, perm=[0, 2, 3, 1])), scale)
        mixed = s.op("MatMul", s.op("Softmax", s.op("Add", scores, mask), axis=-1), v)
        mixed = s.op("Reshape", s.op("Transpose", mixed, perm=[0, 2, 1, 3]), flat)
        x = norm(s.op("Add", linear(mixed, hidden, hidden), x))
        y = linear(x, hidden, 2 * hidden)
        y = s.op("Mul", s.op("Mul", y, s.op("Add", s.op("Erf", s.op("Div", y, root)), one)), half)
        x = norm(s.op("Add", linear(y, 2 * hidden, hidden), x))
    s.op("Identity", x, out="y")
    dims = ["batch", "length"]
    inputs = [info("ids", dims, TensorProto.INT64), info("mask", dims, TensorProto.INT64)]
    model = s.model(inputs, [info("y", [*dims, hidden])])
    return model


def encoder_feeds(batch: int, length: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 50, (batch, length))
    return {"ids": ids, "mask": np.where(np.arange(length) < max(1, length - 1), 1, 0)[None].repeat(batch, 0)}


def many_ports() -> onnx.ModelProto:
    """Two inputs and one unused; outputs: an early one that is used further, a late one, a constant, and an input."""
    s = Sketch()
    s.constant(np.arange(4, dtype=np.float32), "table")
    s.constant(np.arange(900, dtype=np.float32), "long_table")
    early = s.op("Relu", s.op("MatMul", "a", s.weight(8, 8)), out="early")
    both = s.op("Add", early, s.op("MatMul", "b", s.weight(8, 8)))
    s.op("MatMul", s.op("Tanh", both), s.weight(8, 3), out="late")
    dims = ["batch", 8]
    return s.model(
        [info("a", dims), info("b", dims), info("unused", ["batch"])],
        [
            info("early", dims),
            info("late", ["batch", 3]),
            info("table", [4]),
            info("long_table", [900]),
            info("b", dims),
        ],
    )


def branching(stateful: bool = True) -> onnx.ModelProto:
    """An If with branches that use outer values and weights; an LSTM with its state as input and output."""
    s = Sketch()
    s.op("Tanh", s.op("MatMul", "x", s.weight(8, 8, name="before")), out="h")
    s.weight(8, 8, name="outer_weight")
    then = helper.make_graph(
        [helper.make_node("MatMul", ["h", "outer_weight"], ["then_y"])], "then", [], [info("then_y", ["batch", 8])]
    )
    inner = Sketch(5)
    inner.op(
        "MatMul", inner.op("Add", "h", "x", out="inner_sum"), inner.weight(8, 8, name="inner_weight"), out="else_y"
    )
    other = helper.make_graph(inner.nodes, "else", [], [info("else_y", ["batch", 8])], inner.weights)
    s.op("MatMul", "x", s.weight(8, 8), out="side")
    y = s.op("If", "flag", out="chosen", then_branch=then, else_branch=other)
    y = s.op("Add", s.op("MatMul", y, s.weight(8, 8)), "side")
    inputs = [info("x", ["batch", 8]), info("flag", [], TensorProto.BOOL)]
    outputs = [info("y", ["batch", 8])]
    if stateful:
        steps = s.op("Unsqueeze", y, s.constant(np.array([0])))
        gates = (s.weight(1, 32, 8), s.weight(1, 32, 8), s.weight(1, 64))
        s.op("LSTM", steps, *gates, "", "h0", "c0", outputs=["seq", "h1", "c1"], hidden_size=8)
        y = s.op("Squeeze", "seq", s.constant(np.array([0, 1])))
        inputs += [info("h0", [1, "batch", 8]), info("c0", [1, "batch", 8])]
        outputs += [info("h1", [1, "batch", 8]), info("c1", [1, "batch", 8])]
    s.op("Relu", y, out="y")
    return s.model(inputs, outputs)


def sequences() -> onnx.ModelProto:
    """A sequence of tensors between two matrix products: it cannot be handed from session to session."""
    s = Sketch()
    x = s.op("MatMul", "x", s.weight(8, 8))
    parts = s.op("SplitToSequence", s.op("Relu", x), axis=1, keepdims=1)
    x = s.op("ConcatFromSequence", parts, axis=1)
    s.op("MatMul", x, s.weight(8, 4), out="y")
    return s.model([info("x", ["batch", 8])], [info("y", ["batch", 4])])


def strings() -> onnx.ModelProto:
    """Strings in and out."""
    s = Sketch()
    s.op("Identity", "words", out="same")
    dims = ["n"]
    return s.model([info("words", dims, TensorProto.STRING)], [info("same", dims, TensorProto.STRING)])


def random_dag(steps: Sequence[tuple[int, int, int]], outputs: Sequence[int]) -> onnx.ModelProto:
    """A graph over (batch, 8) tensors: step i applies an operator to two earlier tensors, chosen by three numbers."""
    s = Sketch(1)
    values = ["x0", "x1"]
    for kind, first, second in steps:
        a, b = values[first % len(values)], values[second % len(values)]
        out = f"v{len(values)}"
        match kind % 8:
            case 0 | 1:
                s.op("MatMul", a, s.weight(8, 8), out=out)
            case 2:
                s.op("Add", a, b, out=out)
            case 3:
                s.op("Mul", a, b, out=out)
            case 4:
                s.op("Tanh", a, out=out)
            case 5:
                s.op("Relu", a, out=out)
            case 6:
                s.op("Softmax", a, out=out)
            case _:
                half = f"{out}_half"
                s.op("Split", a, outputs=[half, f"{out}_rest"], axis=1)
                s.op("Concat", f"{out}_rest", half, axis=1, out=out)
        values.append(out)
    chosen = dict.fromkeys(values[2:][o % (len(values) - 2)] for o in outputs)
    dims = ["batch", 8]
    return s.model([info("x0", dims), info("x1", dims)], [info(name, dims) for name in chosen])
