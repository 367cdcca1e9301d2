"""Reading ONNX files: shapes, costs, captured values, and models that can only partly be understood."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx_samples as samples
from cotenant.graph.dfg import Dfg
from cotenant.graph.errors import GraphError
from cotenant.graph.onnx import dfg_of, load_dfg, parse_type, type_string


def types(graph: Dfg) -> list[list[str]]:
    return [[graph.operators[i].op_type for i in unit.operators] for unit in graph.units]


def test_a_convolutional_network(tmp_path: Path) -> None:
    onnx.save(samples.residual_cnn(), tmp_path / "net.onnx")
    graph = load_dfg(tmp_path / "net.onnx")
    assert graph.model == "net"
    assert graph.assumed == ("batch",)
    assert graph.inputs[0].shape == ("batch", 3, 16, 16)
    assert types(graph)[:3] == [["Conv", "Relu"], ["Conv", "Relu"], ["Conv", "Add", "Relu"]]
    one = 256 * 16
    assert graph.macs == one * 27 + 5 * one * 144 + one * 16 + one * 400 + 48 * 7
    assert all(op.is_costed for op in graph.operators)
    three = load_dfg(tmp_path / "net.onnx", shapes={"x": (3, 3, 16, 16)})
    assert three.macs == 3 * graph.macs
    assert three.assumed == ()
    assert three.weight_bytes == graph.weight_bytes
    assert three.boundaries[1].live_bytes == 3 * graph.boundaries[1].live_bytes == 3 * one * 4


def test_shapes_computed_in_the_graph_are_followed() -> None:
    s = samples.Sketch()
    length = s.op("Gather", s.op("Shape", "x"), s.constant(np.array(1)), axis=0)
    target = s.op("Concat", s.constant(np.array([-1])), s.op("Unsqueeze", length, s.constant(np.array([0]))), axis=0)
    s.op("MatMul", s.op("Reshape", "x", target), s.weight(6, 5), out="y")
    model = s.model([samples.info("x", ["n", 6, 2])], [samples.info("y", [None, 5])])
    graph = dfg_of(model, name="m", shapes={"x": (7, 6, 2)})
    assert graph.tensors["y"].shape == (14, 5)
    assert graph.macs == 14 * 6 * 5


def test_a_transformer_layer_ends_at_a_cheap_cut() -> None:
    graph = dfg_of(samples.encoder(layers=3), name="m", shapes={"ids": (2, 7)})
    assert graph.assumed == ()
    ends = [
        unit.index + 1 for unit in graph.units if graph.operators[unit.operators[-1]].op_type == "LayerNormalization"
    ]
    assert set(ends) - {len(graph.units)} <= set(graph.cheap_cuts)
    attention = [op for op in graph.operators if op.op_type == "MatMul" and not op.constants]
    assert [op.macs for op in attention] == [2 * 2 * 7 * 7 * 8] * 6


def test_captured_values_are_inputs() -> None:
    graph = dfg_of(samples.branching(), name="m")
    (choice,) = (op for op in graph.operators if op.op_type == "If")
    assert set(choice.inputs) == {"flag", "h", "x"}
    assert "outer_weight" in choice.constants
    assert "inner_weight" not in choice.constants + choice.inputs
    assert not choice.is_costed
    before = next(unit for unit in graph.units if choice.index in unit.operators).index
    assert {"h", "x", "flag"} <= set(graph.live(before))


def test_nested_captures_reach_the_outermost_graph() -> None:
    def branch(inner: list[onnx.NodeProto], out: str) -> onnx.GraphProto:
        return helper.make_graph(inner, out, [], [samples.info(out, [1])])

    deep = helper.make_node(
        "If",
        ["flag"],
        ["deep"],
        then_branch=branch([helper.make_node("Neg", ["far"], ["a"])], "a"),
        else_branch=branch([helper.make_node("Abs", ["far"], ["b"])], "b"),
    )
    outer = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        then_branch=branch([deep], "deep"),
        else_branch=branch([helper.make_node("Identity", ["x"], ["c"])], "c"),
    )
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["far"]), outer],
        "g",
        [samples.info("x", [1]), samples.info("flag", [], TensorProto.BOOL)],
        [samples.info("y", [1])],
    )
    made = dfg_of(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), name="m")
    assert set(made.operators[-1].inputs) == {"flag", "far", "x"}


def test_unknown_operators_leave_holes_and_no_more() -> None:
    s = samples.Sketch()
    s.op("MatMul", "x", s.weight(4, 4), out="known")
    s.nodes.append(helper.make_node("Levitate", ["known"], ["hole"], domain="made.up"))
    s.op("MatMul", "hole", s.weight(4, 4), out="after")
    s.op("MatMul", "known", s.weight(4, 2), out="beside")
    outputs = [samples.info("after", None), samples.info("beside", [3, 2])]
    graph = helper.make_graph(s.nodes, "g", [samples.info("x", [3, 4])], outputs, s.weights)
    made = dfg_of(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), name="m")
    assert {op.outputs[0]: (op.macs, op.is_costed) for op in made.operators} == {
        "known": (48, True),
        "hole": (0, False),
        "after": (0, False),
        "beside": (24, True),
    }
    assert made.tensors["hole"].dtype == ""


def test_fused_and_layout_operators_are_costed() -> None:
    s = samples.Sketch()
    s.nodes.append(helper.make_node("FusedMatMul", ["x", "x"], ["scores"], domain="com.microsoft", transB=1, alpha=0.5))
    s.nodes.append(helper.make_node("FastGelu", ["scores"], ["y"], domain="com.microsoft"))
    graph = helper.make_graph(s.nodes, "g", [samples.info("x", [2, 3, 4])], [samples.info("y", None)])
    made = dfg_of(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), name="m")
    assert made.tensors["y"].shape == (2, 3, 3)
    assert made.macs == 2 * 3 * 3 * 4
    assert types(made) == [["FusedMatMul", "FastGelu"]]


def test_nodes_out_of_order_are_sorted() -> None:
    proto = samples.residual_cnn()
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))
    assert dfg_of(proto, name="m").macs == dfg_of(samples.residual_cnn(), name="m").macs


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"gone\.onnx does not exist"):
        load_dfg(tmp_path / "gone.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"\x00\x01broken")
    with pytest.raises(GraphError, match=r"bad\.onnx"):
        load_dfg(tmp_path / "bad.onnx")
    model = samples.residual_cnn()
    with pytest.raises(GraphError, match="an input 'z'"):
        dfg_of(model, name="m", shapes={"z": (1,)})
    with pytest.raises(GraphError, match="cannot have shape"):
        dfg_of(model, name="m", shapes={"x": (1, 4, 16, 16)})
    model.graph.node[0].input[0] = "y"
    with pytest.raises(GraphError, match="cycle"):
        dfg_of(model, name="m")


@pytest.mark.parametrize(
    "text",
    ["tensor(float)", "tensor(bfloat16)", "tensor(string)", "seq(tensor(int64))", "optional(seq(tensor(float)))"],
)
def test_type_names_come_back(text: str) -> None:
    assert type_string(parse_type(text)) == text


def test_foreign_type_names_are_refused() -> None:
    assert parse_type("map(int64,tensor(float))") is None
    assert parse_type("tensor(made_up)") is None
    assert parse_type("") is None
