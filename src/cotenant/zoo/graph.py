"""Writer of ONNX graphs: collects nodes and constants, and writes a checked model file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17  # the first with LayerNormalization as one operator; onnxruntime >= 1.12 runs it
IR_VERSION = 8  # the IR that came with opset 17: read by every onnxruntime that pyproject.toml admits

Array = NDArray[Any]


class GraphWriter:
    """Collects nodes in topological order. Values are known by name; `op` returns the name of the node's output."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[Any] = []
        self._constants: dict[str, Array] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, dtype: type[np.generic], shape: Sequence[int | str]) -> str:
        """Declare an input; a string in `shape` is a dynamic dimension."""
        self._inputs.append(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
        )
        return name

    def output(self, name: str, shape: Sequence[int | str], value: str) -> None:
        """Declare `value` as the FP32 output `name`."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=f"output/{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def constant(self, name: str, value: Array) -> str:
        """Store an initializer; equal names must have equal values."""
        self._constants.setdefault(name, value)
        return name

    def int64(self, *values: int) -> str:
        """Name of a 1-D INT64 constant, shared by all its users."""
        return self.constant("int64_" + "_".join(map(str, values)), np.array(values, np.int64))

    def scalar(self, value: float) -> str:
        """Name of an FP32 scalar, shared by all its users."""
        return self.constant(f"float_{value!r}", np.array(value, np.float32))

    def op(self, op_type: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Append a node; its only output has the node's name."""
        self._nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def write(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Check the model with `onnx.checker`, and write it atomically to `path`; creates the directory."""
        constants = [numpy_helper.from_array(np.asarray(v, order="C"), k) for k, v in self._constants.items()]
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, constants)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, producer_name="cotenant", ir_version=IR_VERSION, opset_imports=opsets)
        helper.set_model_props(model, dict(metadata))
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            part.write_bytes(model.SerializeToString(deterministic=True))
            onnx.checker.check_model(os.fspath(part))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
