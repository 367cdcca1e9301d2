"""Exported programs as data-flow graphs: operators, costs, units, and where a cut may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cotenant.graph.dfg import Dfg
from cotenant.graph.errors import GraphError
from cotenant.graph.torch import dfg_of_program
from cotenant.graph.torch_names import input_names, output_names
from torch_samples import BATCH, SAMPLES, exported


def graph_of(module: nn.Module, *inputs: torch.Tensor, dynamic: Any = None) -> Dfg:
    return dfg_of_program(torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic), "m")


def kinds(dfg: Dfg) -> list[list[str]]:
    return [[dfg.operators[at].op_type for at in unit.operators] for unit in dfg.units]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_boundary_is_sound(name: str) -> None:
    dfg = dfg_of_program(exported(name)[1], name)
    made = {tensor.name for tensor in dfg.inputs}
    for unit in dfg.units:
        assert set(unit.inputs) <= made
        assert set(dfg.live(unit.index)) <= made
        assert all(dfg.tensors[live].dtype for live in dfg.live(unit.index)), "a number crosses a cut"
        made.update(unit.outputs)
    assert set(dfg.live(len(dfg.units))) == {tensor.name for tensor in dfg.outputs}
    assert [operator.index for operator in dfg.operators] == list(range(len(dfg.operators)))


def test_units_of_a_residual_network() -> None:
    dfg = dfg_of_program(exported("residual")[1], "residual")
    assert kinds(dfg) == [
        ["Conv", "BatchNormalization", "Relu"],
        ["Conv", "BatchNormalization", "Relu"],
        ["Conv", "BatchNormalization", "Add", "Relu"],
        ["MaxPool"],
        ["Conv", "BatchNormalization"],
        ["AveragePool", "Add"],
        ["ReduceMean"],
        ["Gemm"],
    ]
    assert [len(dfg.live(at)) for at in range(9)] == [1, 1, 2, 1, 2, 2, 1, 2, 2]
    assert dfg.cheap_cuts == (1, 3, 6)


def test_products_are_counted() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3, groups=2)
            self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
            self.line = nn.Linear(12, 5)
            self.lstm = nn.LSTM(5, 7, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.up(self.conv(x))  # 2x4x8x8 -> 2x6x6x6 -> 2x4x12x12
            y = self.line(x)  # 2x4x12x5
            z, _ = self.lstm(y.flatten(1, 2))  # 2x48x7
            a = functional.scaled_dot_product_attention(z, z, z)
            return (
                torch.bmm(a, a.transpose(1, 2)),
                torch.einsum("bij,bkj->bik", a, a),
                torch.addmm(y[0, 0], y[0, 0], z[0, :5, :5]),
            )

    dfg = graph_of(Products(), torch.randn(2, 4, 8, 8))
    macs = {operator.op_type: operator.macs for operator in dfg.operators if operator.name != "addmm"}
    assert macs["Conv"] == 2 * 6 * 36 * (2 * 9)
    assert macs["ConvTranspose"] == 2 * 6 * 36 * 4 * 4
    assert macs["Gemm"] == 2 * 4 * 12 * 12 * 5
    assert macs["LSTM"] == 2 * 48 * (4 * 7 * 5 + 4 * 7 * 7)
    assert macs["Attention"] == 2 * (2 * 48 * 7) * 48
    assert macs["MatMul"] == macs["Einsum"] == 2 * 48 * 48 * 7
    assert {operator.name: operator.macs for operator in dfg.operators}["addmm"] == 12 * 5 * 5
    assert all(operator.is_costed for operator in dfg.operators)


def test_bytes_and_weights() -> None:
    dfg = graph_of(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(3, 8))
    (unit,) = dfg.units
    assert (unit.read_bytes, unit.write_bytes, unit.weight_bytes) == (3 * 8 * 4, 3 * 4 * 4, (8 * 4 + 4) * 4)
    assert dfg.operators[0].constants == ("0.weight", "0.bias")
    assert dfg.inputs[0].dtype == "tensor(float)"


def test_open_dimensions_are_bound() -> None:
    program = exported("encoder")[1]
    dfg = dfg_of_program(program, "encoder")
    batch, length = (str(dim) for dim in dfg.inputs[0].shape or ())
    assert dfg.inputs[1].shape == (batch, length)
    assert dfg.assumed == (batch, length)
    bound = dfg_of_program(program, "encoder", {"ids": (3, 10)})
    assert (bound.assumed, bound.inputs[1].size_bytes) == ((), 30)
    linear = [[op.macs for op in each.operators if op.op_type == "Gemm"] for each in (bound, dfg)]
    assert linear[0] == [15 * macs for macs in linear[1]]  # alone the batch is 1, and the length 2, the least it takes
    for shapes, words in (
        ({"words": (1, 2)}, "does not have; its inputs are ids, mask"),
        ({"ids": (3,)}, "cannot have shape"),
        ({"ids": (3, 10), "mask": (3, 11)}, "cannot have shape"),
    ):
        with pytest.raises(GraphError, match=words):
            dfg_of_program(program, "encoder", shapes)


def test_sizes_are_no_tensors_and_close_cuts_where_they_are_lost() -> None:
    dfg = dfg_of_program(exported("sizes")[1], "sizes")
    assert not any("sym_size" in operator.name for operator in dfg.operators)
    assert len(dfg.units) == 2  # no cut where the length is needed later and no tensor has it
    assert set(dfg.live(1)) == {"relu", "y"}


def test_values_close_cuts_until_they_are_used() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = x.sum().item()
            return torch.cumsum(torch.cumsum(x, 0), 0) * factor

    dfg = graph_of(Reads(), torch.ones(3))
    assert sum(len(unit.operators) for unit in dfg.units) >= 4
    for boundary in range(1, len(dfg.units)):
        assert all(dfg.tensors[name].dtype for name in dfg.live(boundary))


def test_several_results_and_lists() -> None:
    class Lists(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            parts = torch.split(x, 2, dim=1)
            values, where = torch.max(parts[0], dim=1)
            return torch.cat([parts[1], parts[2]], dim=1), values + where

    dfg = graph_of(Lists(), torch.randn(4, 6))
    split = dfg.operators[0]
    assert (split.op_type, len(split.outputs), split.inputs) == ("Split", 3, ("x",))
    assert {"ReduceMax", "Concat", "Add"} <= {operator.op_type for operator in dfg.operators}


def test_writing_in_place_becomes_another_tensor() -> None:
    for name in ("residual", "writes"):
        dfg = dfg_of_program(exported(name)[1], name)
        assert not any(operator.op_type.endswith("_") for operator in dfg.operators)
        assert len(dfg.units) > 1


def test_weights_that_two_operators_read_are_told() -> None:
    dfg = dfg_of_program(exported("encoder")[1], "encoder")
    readers = [operator.name for operator in dfg.operators if "qkv.weight" in operator.constants]
    assert len(readers) == 2


def test_a_program_in_training_is_refused() -> None:
    with pytest.raises(GraphError, match="dropout is in training mode"):
        dfg_of_program(torch.export.export(nn.Dropout(0.1).train(), (torch.ones(2, 3),)), "m")


def test_names_from_containers() -> None:
    leaf = '{"type": null, "context": null, "children_spec": []}'
    pair = '{"type": "builtins.tuple", "context": "null", "children_spec": [%s, %s]}'
    named = '{"type": "builtins.dict", "context": "[\\"a\\", \\"b\\"]", "children_spec": [%s, %s]}'
    assert output_names(f"[1, {leaf}]", 1) == ("output",)
    assert output_names(f"[1, {pair % (leaf, leaf)}]", 2) == ("output_0", "output_1")
    assert output_names(f"[1, {named % (leaf, leaf)}]", 2) == ("a", "b")
    assert output_names(f"[1, {named % (leaf, pair % (leaf, leaf))}]", 3) == ("a", "b_0", "b_1")
    assert output_names("", 2) == ("output_0", "output_1")
    empty = '{"type": "builtins.dict", "context": "[]", "children_spec": []}'
    both = pair % (pair % (leaf, leaf), empty)
    assert input_names(f"[1, {both}]", ["x", "y"], ["x_1", "y_1"]) == ("x", "y")
    assert input_names(f"[1, {both}]", None, ["x_1", "y_1"]) == ("x_1", "y_1")
    assert input_names("", ["x"], ["x_1"]) == ("x_1",)


def test_batches_are_shared_between_inputs() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    dfg = graph_of(Two(), torch.ones(2, 3), torch.ones(2, 3), dynamic=({0: BATCH}, {0: BATCH}))
    assert dfg.inputs[0].shape == dfg.inputs[1].shape
    assert len(dfg.assumed) == 1
