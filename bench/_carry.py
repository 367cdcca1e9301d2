"""Models that return their input numbers, row by row, by real work; the benchmark `integrity` uses them.

Every query brings numbers that no other query has, so that rows of another query show up as a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 16
MOST_ROWS = 8
_INNER, _LAYERS = 768, 16
_OPSET, _IR = 17, 8
SEGMENT_MS = 0.5
SLO_MS = 60_000.0
"""Longer than a client waits: no query is refused for being late, so a missing answer has another reason."""

Arrays = dict[str, Any]


def carry(model: int = 0) -> onnx.ModelProto:
    """Spread a row over a wide one, permute that in many layers and gather the row again. FP32 [batch, 16] both ways.

    Products are with zeros and ones, so numbers up to 2^24 come back exactly.
    """
    rng = np.random.default_rng(model)
    place = np.arange(_INNER)
    spread = np.zeros((WIDTH, _INNER), np.float32)
    spread[np.arange(WIDTH), place[:WIDTH]] = 1
    weights, nodes, at = [numpy_helper.from_array(spread, "spread")], [], "x"
    nodes.append(helper.make_node("MatMul", [at, "spread"], ["h0"]))
    for layer in range(_LAYERS):
        order = rng.permutation(_INNER)
        turn = np.zeros((_INNER, _INNER), np.float32)
        turn[np.arange(_INNER), order] = 1
        place = order[place]
        weights.append(numpy_helper.from_array(turn, f"turn{layer}"))
        nodes.append(helper.make_node("MatMul", [f"h{layer}", f"turn{layer}"], [f"h{layer + 1}"]))
    gather = np.zeros((_INNER, WIDTH), np.float32)
    gather[place[:WIDTH], np.arange(WIDTH)] = 1
    weights.append(numpy_helper.from_array(gather, "gather"))
    nodes.append(helper.make_node("MatMul", [f"h{_LAYERS}", "gather"], ["y"]))
    return _model(nodes, [_info("x", ["batch", WIDTH])], [_info("y", ["batch", WIDTH])], weights)


def wide() -> onnx.ModelProto:
    """Rows of any width: one is added and taken away again. FP32 [batch, width] both ways."""
    one = numpy_helper.from_array(np.array([1.0], np.float32), "one")
    nodes = [helper.make_node("Add", ["x", "one"], ["more"]), helper.make_node("Sub", ["more", "one"], ["y"])]
    return _model(nodes, [_info("x", ["batch", "width"])], [_info("y", ["batch", "width"])], [one])


def words() -> onnx.ModelProto:
    """Texts as they are. BYTES [batch, 1] both ways."""
    shape = ["batch", 1]
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return _model(nodes, [_info("x", shape, TensorProto.STRING)], [_info("y", shape, TensorProto.STRING)], [])


def some() -> onnx.ModelProto:
    """Only the numbers above 0: the size of the output depends on values. FP32 [16] to [any]; not merged."""
    zero = numpy_helper.from_array(np.array(0.0, np.float32), "zero")
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["is_some"]),
        helper.make_node("Compress", ["x", "is_some"], ["y"], axis=0),
    ]
    return _model(nodes, [_info("x", [WIDTH])], [_info("y", ["found"])], [zero])


def picky() -> onnx.ModelProto:
    """As `carry`, behind a table of marks, INT64 [batch]: one that is not in the table makes the model raise."""
    model = carry()
    model.graph.node[0].input[0] = "marked"
    table = numpy_helper.from_array(np.zeros((4, 1), np.float32), "table")
    model.graph.initializer.append(table)
    model.graph.node.insert(0, helper.make_node("Gather", ["table", "mark"], ["zeros"], axis=0))
    model.graph.node.insert(1, helper.make_node("Add", ["x", "zeros"], ["marked"]))
    model.graph.input.append(_info("mark", ["batch"], TensorProto.INT64))
    onnx.checker.check_model(model)
    return model


def numbers(query: int, rows: int, width: int = WIDTH) -> Any:
    """Rows that no other query brings; exact in FP32 for a million queries."""
    return (query * MOST_ROWS + np.arange(rows, dtype=np.float32))[:, None] + np.arange(width, dtype=np.float32) / 32


def write_model(
    root: Path, name: str, model: onnx.ModelProto, max_batch: int, lines: Sequence[str] = (), slo_ms: float = SLO_MS
) -> None:
    """Put a model into a repository. `lines` end its configuration."""
    folder = root / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "1" / "model.onnx")
    write_config(folder, max_batch, lines, slo_ms)


def write_config(folder: Path, max_batch: int, lines: Sequence[str] = (), slo_ms: float = SLO_MS) -> None:
    """Configure a model: an SLO that is never missed unless it is given, and segments as short as they get."""
    head = [f"[tenant]\nslo_ms = {slo_ms}\nmax_queue = 4096\n", f"[model]\nmax_batch = {max_batch}\n"]
    text = "\n".join([*head, *lines, f"\n[segments]\nmax_ms = {SEGMENT_MS}\n"])
    (folder / "config.toml").write_text(text, encoding="utf-8")


def write_torch(root: Path, name: str) -> bool:
    """Put `carry` as a torch.export archive into a repository; False where torch is not installed."""
    try:
        import torch
        from torch import nn
    except ImportError:
        return False
    layers = [numpy_helper.to_array(weight) for weight in carry().graph.initializer]

    class Carry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for at, layer in enumerate(layers):
                self.register_buffer(f"w{at}", torch.from_numpy(layer.copy()))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for at in range(len(layers)):
                x = x @ getattr(self, f"w{at}")
            return {"y": x}

    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(Carry().eval(), (torch.zeros(2, WIDTH),), dynamic_shapes={"x": {0: batch}})
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    torch.export.save(program, root / name / "1" / "model.pt2")
    write_config(root / name, MOST_ROWS)
    return True


def write_chain(root: Path, name: str, first: str, second: str, output: str) -> None:
    """Put an application into a repository: two models, one after the other."""
    (root / name).mkdir(parents=True, exist_ok=True)
    text = f"""[application]
slo_ms = {SLO_MS}

[[application.stage]]
name = "first"
model = "{first}"
inputs = {{ x = "x" }}

[[application.stage]]
name = "second"
model = "{second}"
inputs = {{ x = "first.y" }}

[application.outputs]
y = "second.{output}"
"""
    (root / name / "config.toml").write_text(text, encoding="utf-8")


Ask = Callable[[int, int], tuple[Arrays, Any]]
"""(number of the query, rows) to its inputs and to what it must be answered."""


def ask_carry(query: int, rows: int) -> tuple[Arrays, Any]:
    """Of `carry`, and of whatever else takes and gives such rows."""
    made = numbers(query, rows)
    return {"x": made}, made


def ask_wide(query: int, rows: int) -> tuple[Arrays, Any]:
    """Of `wide`: one of several widths."""
    made = numbers(query, rows, (4, 12, 30)[query % 3])
    return {"x": made}, made


def ask_words(query: int, rows: int) -> tuple[Arrays, Any]:
    """Of `words`: short and long texts."""
    made = np.array([[f"{query}/{row} ".encode() * (1 + query % 7)] for row in range(rows)], np.object_)
    return {"x": made}, made


def ask_some(query: int, rows: int) -> tuple[Arrays, Any]:
    """Of `some`: as many numbers as the query has rows, and then some."""
    made = numbers(query, 1)[0] + 1
    made[: query % WIDTH] = 0
    return {"x": made}, made[made > 0]


def _info(name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto],
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "carry", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
    onnx.checker.check_model(model)
    return model
