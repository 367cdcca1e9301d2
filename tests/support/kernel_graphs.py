"""Small graphs that have everything in them that kernels do, and things that they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.loaded_kernels import runtime_of, store_of, version_of
from kernels import a_compiler

SIZE = 12
"""Rows and columns of the picture."""


class Writer:
    """A graph in the making, with seeded weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(3)

    def constant(self, value: Any, dtype: type = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def op(self, kind: str, *inputs: str, **given: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **given))
        return name

    def normal(self, *shape: int, scale: float = 1.0) -> str:
        return self.constant(scale * self.rng.standard_normal(shape))

    def conv(
        self, source: str, channels: int, filters: int, kernel: int, pads: int = 0, groups: int = 1, **given: Any
    ) -> str:
        weights = (
            self.rng.standard_normal((filters, channels // groups, kernel, kernel))
            / kernel
            / (channels // groups) ** 0.5
        )
        bias = self.constant(self.rng.standard_normal(filters))
        return self.op("Conv", source, self.constant(weights), bias, pads=[pads] * 4, group=groups, **given)

    def save(self, path: Path, inputs: dict[str, list[Any]], outputs: list[str]) -> None:
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()]
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", made, results, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.save(onnx.shape_inference.infer_shapes(model), str(path))


def network(path: Path) -> None:
    """Everything that kernels do, and something in the middle and at the end that they do not."""
    w = Writer()
    stem = w.op("Relu", w.conv("x", 3, 24, 3, 1, strides=[2, 2]))
    deep = w.op("Clip", w.conv(stem, 24, 24, 3, 1, groups=24), w.constant(0.0), w.constant(6.0))
    branch = w.op("Add", w.conv(deep, 24, 24, 1), stem)  # a sum in the last pass
    gate = w.op("GlobalAveragePool", branch)
    gate = w.op("Sigmoid", w.conv(w.op("LeakyRelu", w.conv(gate, 24, 8, 1), alpha=0.1), 8, 24, 1))
    scaled = w.op("Mul", branch, gate)
    pooled = w.op("MaxPool", scaled, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1])
    mean = w.op("AveragePool", scaled, kernel_shape=[2, 2], strides=[1, 1], pads=[0, 0, 1, 1])
    joined = w.op("Concat", w.conv(pooled, 24, 32, 1), w.conv(mean, 24, 16, 3, 1, groups=2), pooled, axis=1)
    odd = w.op("Softmax", joined, axis=1)  # for onnxruntime
    both = w.op("Mul", odd, joined)
    both = w.op("Tanh", w.conv(both, 72, 20, 3, 2, dilations=[2, 2]))
    flat = w.op("Flatten", w.op("Add", both, w.conv(both, 20, 20, 1)))
    logits = w.op("Gemm", flat, w.normal(720, 10, scale=1 / 27), w.normal(10))
    w.save(path, {"x": ["n", 3, SIZE, SIZE]}, [logits, both])


def products(path: Path) -> None:
    """Products over rows of numbers with a bias added behind them, beside operators without kernels."""
    w = Writer()
    first = w.op("Add", w.op("MatMul", "x", w.normal(20, 33)), w.normal(33))
    shaped = w.op("Reshape", first, w.constant([0, 0, 3, 11], np.int64))
    turned = w.op("Transpose", shaped, perm=[0, 2, 1, 3])
    back = w.op("Reshape", w.op("Transpose", turned, perm=[0, 2, 1, 3]), w.constant([0, 0, 33], np.int64))
    last = w.op("MatMul", w.op("Softmax", back, axis=-1), w.normal(33, 16))
    w.save(path, {"x": ["n", "rows", 20]}, [last])


def pooled(w: Writer) -> list[str]:
    """A pool with a last window that begins in the padding, which ONNX counts and onnxruntime does not."""
    body = w.conv("x", 8, 24, 1)
    pool = w.op("MaxPool", body, kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1], ceil_mode=1)
    return [w.op("GlobalAveragePool", w.conv(pool, 24, 8, 1))]


def on_kernels(path: Path, cache: Path, shape: list[int]) -> CompiledModel:
    """A model opened with every unit on kernels that can be, one candidate a layer."""
    store, backend = store_of(cache), CKernel(a_compiler())
    model = CompiledModel.open(path, cache_dir=cache)
    asked = model.planner({"x": shape}, store.target.lanes).problems()
    problems = dict.fromkeys(each for unit in asked.values() for each in unit)
    kernels = {each: [version_of(store, search(each, store, backend, SearchEffort(1))[0])] for each in problems}
    model.use(kernels, runtime_of(store), store.target.lanes)
    return model
