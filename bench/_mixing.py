"""Models for the proof of merging: in some of them rows of a batch act on each other, others only look like it.

`drawn` draws a model of a kind from a seed: work that keeps rows separate, an operator that may mix them, and work
again. Dimensions are named as exporters and their users name them: all alike, differently, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from cotenant.execute.batches import for_client

Arrays = dict[str, Any]
_OPSET, _IR = 19, 9
_FLOAT, _INT, _BOOL, _TEXT = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING


class Graph:
    """Collects nodes and weights; `op` gives the name of what it made."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def op(self, kind: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        names = list(outputs) or [f"t{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0]

    def rows(self, x: str, width: int) -> str:
        """Work that keeps rows separate."""
        for _ in range(int(self.rng.integers(0, 3))):
            weight = self.rng.standard_normal((width, width)) / width**0.5
            x = self.op("MatMul", x, self.const(weight))
            x = self.op(str(self.rng.choice(["Relu", "LeakyRelu", "Identity"])), x)
        return x


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn model. `is_mixing` says whether answers depend on other rows; `ask` draws the inputs of a query."""

    kind: str
    model: onnx.ModelProto
    shape: dict[str, tuple[int, ...]]
    is_mixing: bool
    ask: Callable[[np.random.Generator, int], Arrays]


Build = Callable[[Graph, str, int], str]


def _axis0(kind: str) -> Build:
    def build(g: Graph, x: str, width: int) -> str:
        if kind == "CumSum":
            return g.op(kind, x, g.const(0, np.int64))
        if kind == "TopK":
            rows = g.op("Shape", x, start=0, end=1)
            return g.op(kind, x, rows, outputs=["sorted", "places"], axis=0)
        if kind in ("ReduceMean", "ReduceMax", "ReduceL2"):
            return g.op("Sub", x, g.op(kind, x, g.const([0], np.int64), keepdims=1))
        return g.op(kind, x, axis=0)

    return build


def _threshold(g: Graph, x: str, width: int) -> str:
    """Rows with a number above a threshold are lowered by the largest of all rows; others stay as they are."""
    limit = g.const(float(g.rng.choice([5.0, 50.0, 500.0])))
    largest = g.op("ReduceMax", x, g.const([0, 1], np.int64), keepdims=1)
    is_above = g.op("Greater", largest, limit)
    return g.op("Where", is_above, g.op("Sub", x, largest), x)


def _place(g: Graph, x: str, width: int) -> str:
    """From some place in the batch on, a row gets its place added."""
    count = g.op("Squeeze", g.op("Shape", x, start=0, end=1))
    places = g.op("Cast", g.op("Range", g.const(0, np.int64), count, g.const(1, np.int64)), to=_FLOAT)
    late = g.op("Relu", g.op("Sub", places, g.const(float(g.rng.integers(0, 3)))))
    return g.op("Add", x, g.op("Unsqueeze", late, g.const([1], np.int64)))


def _length(g: Graph, x: str, width: int) -> str:
    """Rows are scaled by the share that the longest row of the batch fills: numbers other than 0."""
    filled = g.op("Cast", g.op("Cast", x, to=_BOOL), to=_FLOAT)
    lengths = g.op("ReduceSum", filled, g.const([1], np.int64), keepdims=1)
    longest = g.op("ReduceMax", lengths, g.const([0], np.int64), keepdims=1)
    return g.op("Div", g.op("Mul", x, lengths), g.op("Add", longest, g.const(1.0)))


def _quantised(g: Graph, x: str, width: int) -> str:
    """A product with dynamic quantisation: the scale is that of all rows."""
    for end in ("quantised", "scale", "zero"):
        assert end not in {name for node in g.nodes for name in node.output}
    g.op("DynamicQuantizeLinear", x, outputs=["quantised", "scale", "zero"])
    weight = g.rng.integers(-127, 127, (width, width))
    product = g.op("MatMulInteger", "quantised", g.const(weight, np.int8), "zero")
    return g.op("Mul", g.op("Cast", product, to=_FLOAT), g.op("Mul", "scale", g.const(1 / (127 * width**0.5))))


def _found(g: Graph, x: str, width: int) -> str:
    """Only rows that begin with a number above a threshold: a detector, exported with a named row dimension."""
    first = g.op("Gather", x, g.const(0, np.int64), axis=1)
    is_hit = g.op("Greater", first, g.const(float(g.rng.choice([0.0, 0.5]))))
    return g.op("Compress", x, is_hit, axis=0)


def _turned(g: Graph, x: str, width: int) -> str:
    """Softmax of rows as if axis 0 were something else."""
    return g.op("Transpose", g.op("Softmax", g.op("Transpose", x, perm=[1, 0]), axis=-1), perm=[1, 0])


def _apart(g: Graph, x: str, width: int) -> str:
    """Nothing but rows."""
    return g.op("Softmax", x, axis=-1)


def _hidden(g: Graph, x: str, width: int) -> str:
    """Rows and an axis merged and separated again, which no analysis of single axes follows."""
    flat = g.op("Reshape", x, g.const([-1], np.int64))
    return g.op("Reshape", g.op("Tanh", flat), g.const([-1, width], np.int64))


def _sliced(g: Graph, x: str, width: int) -> str:
    """A slice of all rows, which looks like a choice among them."""
    return g.op("Slice", x, g.const([0], np.int64), g.const([10**9], np.int64), g.const([0], np.int64))


_OF_FLOATS: dict[str, tuple[Build, bool]] = {
    "softmax over rows": (_axis0("Softmax"), True),
    "mean over rows": (_axis0("ReduceMean"), True),
    "largest of rows": (_axis0("ReduceMax"), True),
    "norm over rows": (_axis0("ReduceL2"), True),
    "running sum": (_axis0("CumSum"), True),
    "sorted rows": (_axis0("TopK"), True),
    "above a threshold": (_threshold, True),
    "by place": (_place, True),
    "by length": (_length, True),
    "dynamic quantisation": (_quantised, True),
    "found rows": (_found, True),
    "turned": (_turned, True),
    "apart": (_apart, False),
    "reshaped": (_hidden, False),
    "sliced": (_sliced, False),
}


def _names(rng: np.random.Generator, count: int) -> list[str | None]:
    style = int(rng.integers(0, 3))
    return [("batch", f"rows{at}", None)[style] for at in range(count)]


def _of_floats(kind: str, rng: np.random.Generator) -> Drawn:
    g, width = Graph(rng), int(rng.integers(3, 9))
    build, is_mixing = _OF_FLOATS[kind]
    # lengths, hits and thresholds are of what clients send; elsewhere the layers before may be anything
    x = "x" if kind in ("by length", "found rows", "above a threshold") else g.rows("x", width)
    x = build(g, x, width)
    g.op("Identity", x if kind == "found rows" else g.rows(x, width), outputs=["y"])
    first, last = _names(rng, 2)

    def ask(draw: np.random.Generator, rows: int) -> Arrays:
        made = draw.standard_normal((rows, width)) * 10.0 ** draw.integers(-2, 4)
        made[:, int(draw.integers(1, width)) :] *= draw.integers(0, 2)
        return {"x": made.astype(np.float32)}

    model = _model(g, [_info("x", [first, width])], [_info("y", [last, width])])
    return Drawn(kind, model, {"x": (1, width)}, is_mixing, ask)


def _tokens(rng: np.random.Generator, is_mixing: bool) -> Drawn:
    """Token ids with a mask: vectors of a table, summed by mask; mixed, less the mean over the rows."""
    g, length, words, width = Graph(rng), int(rng.integers(2, 9)), int(rng.integers(12, 400)), 6
    vectors = g.op("Gather", g.const(rng.standard_normal((words, width))), "ids")
    mask = g.op("Unsqueeze", g.op("Cast", "mask", to=_FLOAT), g.const([2], np.int64))
    x = g.op("ReduceSum", g.op("Mul", vectors, mask), g.const([1], np.int64), keepdims=0)
    if is_mixing:
        x = g.op("Sub", x, g.op("ReduceMean", x, g.const([0], np.int64), keepdims=1))
    else:
        x = _hidden(g, x, width)
    g.op("Identity", x, outputs=["y"])
    first, second, last = _names(rng, 3)

    def ask(draw: np.random.Generator, rows: int) -> Arrays:
        masks = np.arange(length)[None] < draw.integers(1, length + 1, (rows, 1))
        return {"ids": draw.integers(0, words, (rows, length)), "mask": masks.astype(np.int64)}

    inputs = [_info("ids", [first, length], _INT), _info("mask", [second, length], _INT)]
    shape = {"ids": (1, length), "mask": (1, length)}
    return Drawn("tokens", _model(g, inputs, [_info("y", [last, width])]), shape, is_mixing, ask)


def _integers(rng: np.random.Generator, is_mixing: bool) -> Drawn:
    """Integers less the least of their row, or of all rows."""
    g, width = Graph(rng), int(rng.integers(2, 6))
    axes = [0, 1] if is_mixing else [1]
    x = g.op("Sub", "x", g.op("ReduceMin", "x", g.const(axes, np.int64), keepdims=1))
    flat = g.op("Reshape", x, g.const([-1], np.int64))
    g.op("Reshape", flat, g.const([-1, width], np.int64), outputs=["y"])
    first, last = _names(rng, 2)

    def ask(draw: np.random.Generator, rows: int) -> Arrays:
        return {"x": draw.integers(-5, 1 + 10 ** draw.integers(0, 5), (rows, width))}

    model = _model(g, [_info("x", [first, width], _INT)], [_info("y", [last, width], _INT)])
    return Drawn("integers", model, {"x": (1, width)}, is_mixing, ask)


def _flags(rng: np.random.Generator, is_mixing: bool) -> Drawn:
    """Flags that hold for a row, or for any row."""
    g, width = Graph(rng), int(rng.integers(2, 6))
    sums = g.op("Cast", "x", to=_FLOAT)
    if is_mixing:
        sums = g.op("Add", g.op("ReduceMax", sums, g.const([0], np.int64), keepdims=1), g.op("Mul", sums, g.const(0.0)))
    flat = g.op("Reshape", sums, g.const([-1], np.int64))
    back = g.op("Reshape", flat, g.const([-1, width], np.int64))
    g.op("Cast", back, outputs=["y"], to=_BOOL)
    first, last = _names(rng, 2)

    def ask(draw: np.random.Generator, rows: int) -> Arrays:
        return {"x": draw.integers(0, 2, (rows, width)).astype(bool)}

    model = _model(g, [_info("x", [first, width], _BOOL)], [_info("y", [last, width], _BOOL)])
    return Drawn("flags", model, {"x": (1, width)}, is_mixing, ask)


def _texts(rng: np.random.Generator, is_mixing: bool) -> Drawn:
    """Whether a text is that of the batch's first row, and the text; or the text alone."""
    g = Graph(rng)
    if is_mixing:
        first_row = g.op("Gather", "x", g.const([0], np.int64), axis=0)
        same = g.op("Equal", "x", first_row)
        g.op("Where", same, "x", g.op("Expand", g.const([[""]], np.object_), g.op("Shape", "x")), outputs=["y"])
    else:
        flat = g.op("Reshape", "x", g.const([-1], np.int64))
        g.op("Reshape", flat, g.const([-1, 1], np.int64), outputs=["y"])
    first, last = _names(rng, 2)

    def ask(draw: np.random.Generator, rows: int) -> Arrays:
        return {"x": np.array([[f"{draw.integers(0, 50)}"] for _ in range(rows)], np.object_)}

    model = _model(g, [_info("x", [first, 1], _TEXT)], [_info("y", [last, 1], _TEXT)])
    return Drawn("texts", model, {"x": (1, 1)}, is_mixing, ask)


def _lengths(rng: np.random.Generator, is_mixing: bool) -> Drawn:
    """A row of numbers and how many of them count; mixed, the mean divides by the longest of the batch."""
    g, width = Graph(rng), int(rng.integers(3, 9))
    at = g.const(np.arange(width)[None], np.int64)
    mask = g.op("Cast", g.op("Less", at, g.op("Unsqueeze", "length", g.const([1], np.int64))), to=_FLOAT)
    total = g.op("ReduceSum", g.op("Mul", "x", mask), g.const([1], np.int64), keepdims=0)
    count = g.op("Cast", "length", to=_FLOAT)
    if is_mixing:
        count = g.op("ReduceMax", count, g.const([0], np.int64), keepdims=1)
    flat = g.op("Reshape", g.op("Div", total, count), g.const([-1, 1, 1], np.int64))
    g.op("Reshape", flat, g.const([-1], np.int64), outputs=["y"])
    first, second, last = _names(rng, 3)

    def ask(draw: np.random.Generator, rows: int) -> Arrays:
        made = draw.standard_normal((rows, width)).astype(np.float32)
        return {"x": made, "length": draw.integers(1, width + 1, rows)}

    inputs = [_info("x", [first, width]), _info("length", [second], _INT)]
    return Drawn("lengths", _model(g, inputs, [_info("y", [last])]), {"x": (1, width), "length": (1,)}, is_mixing, ask)


_OTHERS: dict[str, Callable[[np.random.Generator, bool], Drawn]] = {
    "tokens": _tokens,
    "integers": _integers,
    "flags": _flags,
    "texts": _texts,
    "lengths": _lengths,
}
KINDS = (*_OF_FLOATS, *(f"{kind}, {how}" for kind in _OTHERS for how in ("mixed", "apart")))


class Alone:
    """What a drawn model answers a query alone, as onnxruntime runs it without optimisation."""

    def __init__(self, made: Drawn, seed: int = 0) -> None:
        self._made = made
        self._seed = seed
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self._session = ort.InferenceSession(made.model.SerializeToString(), options)

    def run(self, tensors: Arrays) -> Arrays:
        """All outputs; texts as str."""
        names = [each.name for each in self._session.get_outputs()]
        return dict(zip(names, self._session.run(None, tensors), strict=True))

    def ask(self, query: int, rows: int) -> tuple[Arrays, Any]:
        """See `_carry.Ask`. Texts are bytes, as on the wire."""
        inputs = self._made.ask(np.random.default_rng((self._seed, query)), rows)
        [expected] = for_client(self.run(inputs)).values()
        return for_client(inputs), expected


def drawn(kind: str, seed: int) -> Drawn:
    """A model of one of KINDS."""
    rng = np.random.default_rng((seed, KINDS.index(kind)))
    if kind in _OF_FLOATS:
        return _of_floats(kind, rng)
    name, _, how = kind.partition(", ")
    return _OTHERS[name](rng, how == "mixed")


def _info(name: str, shape: Sequence[int | str | None], kind: int = _FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(g: Graph, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> onnx.ModelProto:
    graph = helper.make_graph(g.nodes, "drawn", inputs, outputs, g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
    onnx.checker.check_model(model)
    return model
