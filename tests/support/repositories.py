"""Model repositories of small ONNX models for tests: good ones, and ones that are wrong in every way that we name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import cotenant
from onnx_samples import Sketch, encoder, info, residual_cnn, strings

SLO_MS = 20_000
"""So long that a busy machine cannot make a test's query late."""


def config(name: str = "", max_batch: int = 1, more: str = "", slo_ms: float = SLO_MS) -> str:
    tenant = f'name = "{name}"\n' if name else ""
    return f"[tenant]\nslo_ms = {slo_ms}\n{tenant}{more}\n[model]\nmax_batch = {max_batch}\n"


def add_sub() -> onnx.ModelProto:
    """Sum and difference of two integer tensors; dynamic batch."""
    s = Sketch()
    s.op("Add", "a", "b", out="sum")
    s.op("Sub", "a", "b", out="difference")
    dims = ["batch", 4]
    return s.model(
        [info("a", dims, TensorProto.INT32), info("b", dims, TensorProto.INT32)],
        [info("sum", dims, TensorProto.INT32), info("difference", dims, TensorProto.INT32)],
    )


def scaled(factor: float) -> onnx.ModelProto:
    """Two units: x times a factor, through two products; dynamic batch."""
    s = Sketch()
    x = s.op("MatMul", "x", s.constant(np.eye(8, dtype=np.float32)))
    x = s.op("Softsign", x)
    s.op("MatMul", x, s.constant(np.eye(8, dtype=np.float32) * np.float32(factor)), out="y")
    return s.model([info("x", ["batch", 8])], [info("y", ["batch", 8])])


def chooser() -> onnx.ModelProto:
    """Rows of a table of ten by index: an index outside fails at run time."""
    s = Sketch()
    s.constant(np.arange(20, dtype=np.float32).reshape(10, 2), "table")
    s.op("Gather", "table", "index", out="y", axis=0)
    return s.model([info("index", ["batch"], TensorProto.INT64)], [info("y", ["batch", 2])])


def fixed() -> onnx.ModelProto:
    s = Sketch()
    s.op("Relu", "x", out="y")
    return s.model([info("x", [1, 8])], [info("y", [1, 8])])


def open_shape() -> onnx.ModelProto:
    s = Sketch()
    s.op("Relu", "x", out="y")
    return s.model([info("x", ["batch", "length"])], [info("y", ["batch", "length"])])


def external(location: str) -> onnx.ModelProto:
    """A weight that is kept in a file."""
    model = scaled(1.0)
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", location
    return model


def unsupported() -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("NoSuchOperator", ["x"], ["y"])], "g", [info("x", [1, 8])], [info("y", [1, 8])]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def unprofilable() -> onnx.ModelProto:
    """Fails with every input: a Reshape that cannot be."""
    s = Sketch()
    s.op("Reshape", "x", s.constant(np.array([7, -1])), out="y")
    return s.model([info("x", ["batch", 8])], [info("y", [7, "n"])])


ENCODER_SHAPES = """
[[model.shapes]]
ids = [1, 8]
mask = [1, 8]
[[model.shapes]]
ids = [1, 32]
mask = [1, 32]
"""
GOOD: dict[str, tuple[str, dict[int, Callable[[], onnx.ModelProto]]]] = {
    "add_sub": (config(max_batch=8), {1: add_sub}),
    "cnn": (config(max_batch=4, more="priority = 3\nweight = 2.0"), {1: residual_cnn}),
    "encoder": (config(max_batch=4) + ENCODER_SHAPES, {1: encoder}),
    "two": (config("Owner of two", max_batch=4), {1: lambda: scaled(1.0), 2: lambda: scaled(2.0)}),
    "chooser": (config(), {1: chooser}),
    "words": (config() + "[[model.shapes]]\nwords = [3]\n", {1: strings}),
}
"""Configuration and versions by model."""
BAD: dict[str, tuple[str, Mapping[Any, Callable[[], onnx.ModelProto] | bytes], tuple[str, ...]]] = {
    "bad_config": ("[tenant]\nslo_ms = 5\nslow_ms = 6\n", {1: fixed}, ("config.toml", "slow_ms")),
    "bad_toml": ("[tenant\n", {1: fixed}, ("config.toml", "not valid TOML")),
    "broken_file": (config(), {1: b"this is no model"}, ("no readable ONNX model", "export it again")),
    "cut_file": (config(), {1: residual_cnn().SerializeToString()[:2000]}, ("model.onnx", "export it again")),
    "empty_file": (config(), {1: b""}, ("holds no ONNX graph",)),
    "no_batch": (config(max_batch=4), {1: fixed}, ("first dimension of input 'x' is fixed", "set max_batch = 1")),
    "no_shape": (config(), {1: open_shape}, ("the shape of input 'x' is open", "[[model.shapes]]\nx = [1, 128]")),
    "no_slo": ("[model]\nmax_batch = 1\n", {1: fixed}, ("tenant.slo_ms is missing", "slo_ms = 100")),
    "no_version": (config(), {}, ("has no version", "expected a directory '1'")),
    "outside": (config(), {1: lambda: external("../../secret.bin")}, ("outside the model's directory",)),
    "two_folders": (
        config(),
        {"2": fixed, "002": fixed},
        ("two_folders: the directories '002' and '2' are both version 2", "remove the other"),
    ),
    "twin": (config("chooser"), {1: chooser}, ("tenant 'chooser' already owns model 'chooser'", "tenant.name")),
    "unsupported": (config(), {1: unsupported}, ("NoSuchOperator",)),
    "wrong_shape": (
        config() + "[[model.shapes]]\nz = [1, 8]\n",
        {1: fixed},
        ("[[model.shapes]] names input 'z'", "it has x"),
    ),
}
"""Configuration, versions, and what the index has to say of them."""


def write_model(
    root: Path, name: str, text: str, versions: Mapping[Any, Callable[[], onnx.ModelProto] | bytes]
) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    for number, make in versions.items():
        (folder / str(number)).mkdir(exist_ok=True)
        content = make if isinstance(make, bytes) else make().SerializeToString()
        (folder / str(number) / "model.onnx").write_bytes(content)


def write_good(root: Path, *names: str) -> Path:
    """A repository of the models in GOOD, or of some of them."""
    for name in names or GOOD:
        text, versions = GOOD[name]
        write_model(root, name, text, dict(versions))
    return root


def write_profiled(root: Path, workload: str, *names: str) -> Path:
    """A repository as `write_good` makes it, with a profile, and `workload.toml` beside it."""
    cotenant.profile(write_good(root, *names), budget_s=0.0)
    (root.parent / "workload.toml").write_text(workload, encoding="utf-8")
    return root


def write_bad(root: Path) -> Path:
    """Add the models in BAD."""
    for name, (text, versions, _) in BAD.items():
        write_model(root, name, text, versions)
    (root.parent / "secret.bin").write_bytes(bytes(256))
    return root


X = {"x": np.linspace(-1, 1, 8, dtype=np.float32)[None]}
