"""Which units of ONNX graphs treat rows by themselves: chunks of the rows against all rows, in onnxruntime."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from cotenant.graph.onnx import dfg_of
from cotenant.graph.rewrite.onnx_rows import row_graph_of
from cotenant.graph.rewrite.rows import RowGraph
from onnx_samples import Sketch, encoder, encoder_feeds, info, residual_cnn
from port_graphs import onnx_answer
from row_chunks import check_chunks

SHAPES = {"x": (1, 3, 4)}


def rows_of(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> RowGraph:
    return row_graph_of(model, dfg_of(model, name="sample", shapes=shapes), shapes)


def model_of(sketch: Sketch, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[str]) -> onnx.ModelProto:
    """What was sketched, with outputs whose types are left to whoever reads it."""
    made = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(sketch.nodes, "sample", inputs, made, sketch.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def one(make: Callable[[Sketch], str], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A graph of x, with `rows` rows of 3 x 4."""
    sketch = Sketch()
    made = make(sketch)
    return model_of(sketch, [info("x", ("rows", 3, 4), kind)], [made])


def five(seed: int = 1) -> Any:
    """Five rows."""
    return np.random.default_rng(seed).normal(size=(5, 3, 4)).astype(np.float32)


# --- operator by operator --------------------------------------------------------------------------------------------


def _ints(sketch: Sketch, *values: int) -> str:
    return sketch.constant(np.array(values, np.int64))


def _shape_part(sketch: Sketch, axis: int) -> str:
    return sketch.op("Gather", sketch.op("Shape", "x"), _ints(sketch, axis), axis=0)


def _reshaped(sketch: Sketch, *parts: str | int) -> str:
    names = [_shape_part(sketch, 0) if part == "rows" else _ints(sketch, int(part)) for part in parts]
    return sketch.op("Reshape", "x", sketch.op("Concat", *names, axis=0))


def _lstm(sketch: Sketch, x: str, states: Sequence[str] = ()) -> str:
    weights = sketch.weight(1, 20, 4), sketch.weight(1, 20, 5), sketch.weight(1, 40)
    return sketch.op("LSTM", x, *weights, *(["", *states] if states else []), hidden_size=5)


def _turned(sketch: Sketch, x: str = "x") -> str:
    return sketch.op("Transpose", x, perm=[1, 0, 2])


def _turned_lstm(sketch: Sketch) -> str:
    """Over steps, with rows along axis 1 and states of zeros as many as there are rows; and back."""
    sizes = sketch.op("Concat", _ints(sketch, 1), _shape_part(sketch, 0), _ints(sketch, 5), axis=0)
    zeros = sketch.op("ConstantOfShape", sizes)
    made = _lstm(sketch, _turned(sketch), (zeros, zeros))
    return sketch.op("Transpose", sketch.op("Squeeze", made, _ints(sketch, 1)), perm=[1, 0, 2])


FINE: dict[str, Callable[[Sketch], str]] = {
    "softmax of a row": lambda s: s.op("Softmax", "x", axis=-1),
    "sum of a row": lambda s: s.op("ReduceSum", "x", _ints(s, 1, 2), keepdims=0),
    "layer normalisation": lambda s: s.op("LayerNormalization", "x", s.weight(4), s.weight(4)),
    "batch normalisation": lambda s: s.op(
        "BatchNormalization", "x", s.weight(3), s.weight(3), s.weight(3), s.constant(np.ones(3, np.float32))
    ),
    "flattened": lambda s: s.op("Flatten", "x"),
    "rows with steps, and back": lambda s: s.op(
        "Reshape", s.op("MatMul", s.op("Reshape", "x", _ints(s, -1, 4)), s.weight(4, 4)), _ints(s, -1, 3, 4)
    ),
    "its own number of rows": lambda s: _reshaped(s, "rows", 12),
    "turned and back": lambda s: _turned(s, s.op("Relu", _turned(s))),
    "a recurrent network over axis 1": _turned_lstm,
    "itself with itself in a row": lambda s: s.op("MatMul", "x", s.op("Transpose", "x", perm=[0, 2, 1])),
    "an equation": lambda s: s.op("Einsum", "x", "x", equation="bij,bkj->bik"),
    "the best of a row": lambda s: s.op("TopK", "x", _ints(s, 2), outputs=["best", "places"], axis=-1),
    "some columns": lambda s: s.op("Gather", "x", _ints(s, 2, 0), axis=1),
    "a slice of columns": lambda s: s.op("Slice", "x", _ints(s, 1), _ints(s, 3), _ints(s, 2)),
    "all rows as a slice": lambda s: s.op("Slice", "x", _ints(s, 0), _ints(s, 2**40), _ints(s, 0)),
    "a table broadcast over rows": lambda s: s.op("Add", "x", s.op("Expand", s.weight(1, 3, 4), s.op("Shape", "x"))),
    "padded columns": lambda s: s.op("Pad", "x", _ints(s, 0, 0, 1, 0, 0, 1)),
    "joined columns": lambda s: s.op("Concat", "x", "x", axis=2),
    "turned weights": lambda s: s.op("Gemm", s.op("Flatten", "x"), s.weight(5, 12), s.weight(5), transB=1),
    "a product that is turned twice": lambda s: s.op(
        "Gemm", s.op("Transpose", s.op("Flatten", "x")), s.weight(12, 5), transA=1
    ),
}
MIXED: dict[str, tuple[Callable[[Sketch], str], str]] = {
    "softmax over rows": (lambda s: s.op("Softmax", "x", axis=0), "works over axis 0"),
    "sum over rows": (lambda s: s.op("ReduceMean", "x", axes=[0], keepdims=1), "works over axis 0"),
    "sum of all": (lambda s: s.op("ReduceMax", "x"), "works over axis 0"),
    "taken together across rows": (lambda s: s.op("Reshape", "x", _ints(s, 3, -1)), "takes axes together"),
    "two rows in one": (lambda s: s.op("Reshape", "x", _ints(s, -1, 24)), "unknown|not known|together|several"),
    "several rows of a row": (lambda s: s.op("Reshape", "x", _ints(s, -1, 4)), "has several rows for every row"),
    "rows along axis 1": (_turned, "has its rows along axis 1"),
    "a recurrent network over rows": (lambda s: _lstm(s, "x"), "works over axis 0"),
    "rows with rows": (
        lambda s: s.op("MatMul", s.op("Flatten", "x"), s.op("Transpose", s.op("Flatten", "x"))),
        "together with others",
    ),
    "best of all rows": (
        lambda s: s.op("TopK", "x", _ints(s, 2), outputs=["best", "places"], axis=0),
        "works over axis 0",
    ),
    "what is not zero": (lambda s: s.op("NonZero", "x"), "as many as it finds"),
    "different values": (lambda s: s.op("Unique", "x"), "as many as it finds"),
    "some rows": (lambda s: s.op("Gather", "x", _ints(s, 0, 1), axis=0), "works over axis 0"),
    "rows turned round": (
        lambda s: s.op("Slice", "x", _ints(s, -1), _ints(s, -(2**40)), _ints(s, 0), _ints(s, -1)),
        "works over axis 0",
    ),
    "a row less": (lambda s: s.op("Slice", "x", _ints(s, 0), _ints(s, -1), _ints(s, 0)), "works over axis 0"),
    "a row more": (lambda s: s.op("Pad", "x", _ints(s, 1, 0, 0, 0, 0, 0)), "works over axis 0"),
    "all rows twice": (lambda s: s.op("Concat", "x", "x", axis=0), "works over axis 0"),
    "rows below each other": (lambda s: s.op("Tile", "x", _ints(s, 2, 1, 1)), "does not have a row for every row"),
    "sums over rows before": (lambda s: s.op("CumSum", "x", _ints(s, 0)), "works over axis 0"),
    "divided by the number of rows": (
        lambda s: s.op("Div", "x", s.op("Cast", _shape_part(s, 0), to=TensorProto.FLOAT)),
        "computes with the number of rows",
    ),
    "numbered": (
        lambda s: s.op(
            "Range",
            _ints(s, 0) if False else s.op("Squeeze", _ints(s, 0)),
            s.op("Squeeze", _shape_part(s, 0)),
            s.op("Squeeze", _ints(s, 1)),
        ),
        "computes with the number of rows",
    ),
    "the shape itself": (lambda s: s.op("Shape", "x"), "tells the number of rows"),
    "batch statistics": (
        lambda s: s.op(
            "BatchNormalization",
            *("x", s.weight(3), s.weight(3), s.weight(3), s.weight(3)),
            outputs=["normal", "mean", "variance"],
            training_mode=1,
        ),
        "training mode",
    ),
    "random numbers": (lambda s: s.op("RandomNormalLike", "x"), "draws random numbers"),
    "scaled by all": (
        lambda s: s.op("DynamicQuantizeLinear", "x", outputs=["q", "scale", "zero"]),
        "scales by the range of all rows",
    ),
    "a table by rows": (lambda s: s.op("MatMul", s.weight(2, 3), "x"), ""),
}


@pytest.mark.parametrize("name", FINE)
def test_operators_that_keep_rows_apart_run_in_chunks(name: str) -> None:
    model = one(FINE[name])
    found = rows_of(model, SHAPES)
    count = len(found.dfg.units)
    assert found.why_not(0, count) == ""
    check_chunks(model, found.dfg, (0, count), (2, 1, 2), {"x": five()})


@pytest.mark.parametrize("name", [name for name, (_, why) in MIXED.items() if why])
def test_operators_that_mix_rows_are_refused_with_the_reason(name: str) -> None:
    make, why = MIXED[name]
    found = rows_of(one(make), SHAPES)
    assert re.search(why, found.why_not(0, len(found.dfg.units)))


def test_a_factor_that_is_the_same_for_all_rows_keeps_them_apart() -> None:
    model = one(MIXED["a table by rows"][0])
    found = rows_of(model, SHAPES)
    assert found.why_not(0, 1) == ""
    check_chunks(model, found.dfg, (0, 1), (4, 1), {"x": five()})


def test_batches_of_a_fixed_size_and_inputs_of_another_axis_are_refused() -> None:
    sketch = Sketch()
    model = model_of(sketch, [info("x", (4, 3))], [sketch.op("Relu", "x")])
    assert "first dimension of every input is fixed" in rows_of(model, {"x": (4, 3)}).why_not(0, 1)
    sketch = Sketch()
    model = model_of(sketch, [info("x", ("rows", 3)), info("y", (2, "rows", 3))], [sketch.op("Mul", "x", "y")])
    assert "fixed" not in (why := rows_of(model, {"x": (1, 3), "y": (2, 1, 3)}).why_not(0, 1))
    assert "does not have a row for every row" in why


@pytest.mark.parametrize("op", ["Softmax", "LayerNormalization", "Transpose", "Slice", "Pad", "Gather"])
def test_tensors_that_are_said_to_have_no_axes_are_not_worked_along(op: str) -> None:
    """onnxruntime gives no axes for tensors of which it knows no shape."""
    sketch = Sketch()
    opaque = sketch.op("Loop", _ints(sketch, 1), "", "x")
    more = {"LayerNormalization": 1, "Slice": 2, "Pad": 1, "Gather": 1}.get(op, 0)
    made = sketch.op(op, opaque, *(_ints(sketch, 0) for _ in range(more)))
    model = model_of(sketch, [info("x", ("rows", 3, 4))], [made])
    number = helper.make_tensor_type_proto(TensorProto.FLOAT, ())
    dfg = dfg_of(model, name="sample", shapes=SHAPES)
    rows = row_graph_of(model, dfg, SHAPES, lambda _: {opaque: number, made: number})
    assert not any(rows.splits)


# --- whole graphs -----------------------------------------------------------------------------------------------------


def test_a_convolutional_network_runs_any_run_of_units_in_chunks() -> None:
    model = residual_cnn()
    name = model.graph.input[0].name
    shape = (1, *(dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim[1:]))
    found = rows_of(model, {name: shape})
    count = len(found.dfg.units)
    assert found.splits == (True,) * count
    assert found.runs == (tuple(range(count + 1)),)
    x = np.random.default_rng(2).normal(size=(6, *shape[1:])).astype(np.float32)
    for units in ((0, count), (1, count - 1), (count // 2, count // 2 + 1)):
        check_chunks(model, found.dfg, units, (1, 2, 3), {name: x})


def test_attention_over_a_sequence_runs_in_chunks() -> None:
    model = encoder()
    inputs = encoder_feeds(5, 7)
    shapes = {name: (1, *array.shape[1:]) for name, array in inputs.items()}
    found = rows_of(model, shapes)
    count = len(found.dfg.units)
    assert found.why_not(0, count) == ""
    check_chunks(model, found.dfg, (0, count), (2, 3), inputs)


Choice = tuple[int, int, int]
Dim = int | str


def drawn(choices: Sequence[Choice]) -> tuple[onnx.ModelProto, int]:
    """A graph of operators, of which many mix rows if their axis is that of the rows; and how many it has.

    Sizes that grow with the rows are texts: nothing is made that fits for one number of rows alone.
    """
    sketch = Sketch(len(choices))
    made: list[tuple[str, tuple[Dim, ...]]] = [("x", ("r", 3, 4))]
    for kind, a, b in choices:
        name, dims = made[-1 - a % min(2, len(made))]
        rank = len(dims)
        axis = b % rank if rank else 0
        own, last = dims[axis] if rank else 1, dims[-1] if rank else "none"
        without = (*dims[:axis], *dims[axis + 1 :])
        turned = list(range(rank))
        if rank:
            turned[axis], turned[a % rank] = turned[a % rank], turned[axis]
        if not rank:
            continue
        match kind:
            case 0 if isinstance(last, int) and rank > 1:
                made.append((sketch.op("MatMul", name, sketch.weight(last, 4)), (*dims[:-1], 4)))
            case 1:
                made.append((sketch.op("Softmax", name, axis=axis), dims))
            case 2:
                kept = a % 2
                made.append(
                    (
                        sketch.op("ReduceMean", name, axes=[axis], keepdims=kept),
                        (*dims[:axis], 1, *dims[axis + 1 :]) if kept else without,
                    )
                )
            case 3:
                made.append((sketch.op("Transpose", name, perm=turned), tuple(dims[at] for at in turned)))
            case 4 if rank > 1:
                grown = "r" if "r" in dims[0:1] else "s"
                rest = [dim for dim in dims[1:] if isinstance(dim, str)]
                size = "s" if rest else int(np.prod([int(dim) for dim in dims[1:]]))
                made.append(
                    (sketch.op("Reshape", name, _ints(sketch, 0, -1)), (dims[0] if grown == "s" else "r", size))
                )
            case 5 if rank > 1 and isinstance(last, int):
                made.append((sketch.op("Reshape", name, _ints(sketch, -1, last)), ("s" if "r" in dims else 1, last)))
            case 6 if isinstance(own, int) or a % 3 == 0:
                size = 2 * own if isinstance(own, int) else "s"
                made.append((sketch.op("Concat", name, name, axis=axis), (*dims[:axis], size, *dims[axis + 1 :])))
            case 7:
                cut = sketch.op("Slice", name, _ints(sketch, 0), _ints(sketch, 1), _ints(sketch, axis))
                made.append((cut, (*dims[:axis], 1, *dims[axis + 1 :])))
            case 8:
                ends = (-1, -(2**40)) if a % 2 else (0, 2**40)
                step = -1 if a % 2 else 1
                cut = sketch.op("Slice", name, *(_ints(sketch, v) for v in (ends[0], ends[1], axis, step)))
                made.append((cut, dims))
            case 9:
                made.append((sketch.op("CumSum", name, _ints(sketch, axis)), dims))
            case 10 if rank > 1:
                order = [*range(rank - 2), rank - 1, rank - 2]
                made.append(
                    (sketch.op("MatMul", name, sketch.op("Transpose", name, perm=order)), (*dims[:-1], dims[-2]))
                )
            case 11:
                size_of = sketch.op("Cast", sketch.op("Gather", sketch.op("Shape", name), _ints(sketch, axis)), to=1)
                made.append((sketch.op("Mul", name, size_of), dims))
            case 12:
                other = next((each for each, shape in made if shape == dims and each != name), name)
                made.append((sketch.op("Add", name, other), dims))
            case 13 if isinstance(last, int):
                made.append((sketch.op("LayerNormalization", name, sketch.weight(last), axis=-1), dims))
            case 14:
                table = sketch.op("Expand", sketch.weight(1), sketch.op("Shape", name))
                made.append((sketch.op("Mul", name, table), dims))
            case _:
                made.append((sketch.op("Relu", name), dims))
    if len(made) == 1:
        made.append((sketch.op("Relu", "x"), made[0][1]))
    used = {name for node in sketch.nodes for name in node.input}
    outputs = [name for name, _ in made[1:] if name not in used]
    return model_of(sketch, [info("x", ("rows", 3, 4))], outputs), len(made)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=9), st.data())
def test_whatever_is_let_through_computes_the_same_in_chunks(choices: list[Choice], data: st.DataObject) -> None:
    model, _ = drawn(choices)
    x = five(3)
    try:
        onnx_answer(model, {"x": x})
    except Exception:  # a size of the rows met a number: no model
        return
    found = rows_of(model, SHAPES)
    count = len(found.dfg.units)
    ranges = [(a, b) for a in range(count) for b in range(a + 1, count + 1) if not found.why_not(a, b)]
    event(f"{'some' if ranges else 'no'} runs of units are let through")
    if ranges:
        chosen = data.draw(st.sampled_from(ranges))
        rows = data.draw(st.sampled_from([(2, 3), (1, 1, 3), (4, 1)]))
        for each in {chosen, ranges[-1]}:
            check_chunks(model, found.dfg, each, rows, {"x": x})
