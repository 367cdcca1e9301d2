"""Cuts the operators of some units out of an optimised graph, as a model of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TypeProto, helper

from cotenant.execute.onnx.segment_store import Stored
from cotenant.graph.dfg import Dfg
from cotenant.graph.onnx import node_inputs


@dataclass(frozen=True, slots=True)
class CutModel:
    """Some units as a serialised model, and the names of constants that they read."""

    model: bytes
    weights: tuple[str, ...]


_PREPACKED = frozenset({"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "Attention", "LSTM", "GRU"})
"""Operators for which onnxruntime repacks weights in each session: shared weights would be an additional copy."""


class OnnxCutter:
    """Cuts one stored graph. Holds operators and small constants, but no large weights.

    `shared_weights` are the constants that sessions should share.
    """

    def __init__(self, stored: Stored, dfg: Dfg) -> None:
        model = stored.skeleton
        by_output = {name: node for node in model.graph.node for name in node.output if name}
        self._nodes = [by_output[op.outputs[0]] for op in dfg.operators if op.outputs]
        self._dfg = dfg
        self._constants = {init.name: init for init in model.graph.initializer}
        self._sparse = {init.values.name: init for init in model.graph.sparse_initializer}
        inputs = {info.name: info.type for info in model.graph.input}
        self._types = {name: _open(kind) for name, kind in {**stored.types, **inputs}.items()}
        packed = {name for node in self._nodes if node.op_type in _PREPACKED for name in node.input}
        self.shared_weights = tuple(init for init in model.graph.initializer if init.name not in packed)
        self._opsets = list(model.opset_import)
        self._ir_version = model.ir_version
        self._functions = list(model.functions)

    def cut(self, units: Sequence[int], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> CutModel:
        """Cut out these units, in the order of a valid run, with their inputs from and outputs for other units."""
        nodes = [self._nodes[position] for unit in units for position in self._dfg.units[unit].operators]
        names = dict.fromkeys(name for node in nodes for name in node_inputs(node))
        constants = [name for name in names if name in self._constants]
        graph = helper.make_graph(
            nodes,
            f"units {min(units)} to {max(units) + 1}",
            [onnx.ValueInfoProto(name=name, type=self._types[name]) for name in inputs],
            [onnx.ValueInfoProto(name=name, type=self._types.get(name)) for name in outputs],
            [self._constants[name] for name in constants],
            sparse_initializer=[self._sparse[name] for name in names if name in self._sparse],
        )
        model = helper.make_model(
            graph, opset_imports=self._opsets, ir_version=self._ir_version, functions=self._functions
        )
        return CutModel(model.SerializeToString(), tuple(constants))


def sealed_tensors(stored: Stored) -> tuple[str, ...]:
    """Tensors that cannot be passed between sessions: their type is unknown, or no numeric tensor."""
    made = (name for node in stored.skeleton.graph.node for name in node.output if name)
    return tuple(name for name in made if not _is_tensor(stored.types.get(name)))


def _is_tensor(kind: TypeProto | None) -> bool:
    return (
        kind is not None
        and kind.HasField("tensor_type")
        and kind.tensor_type.elem_type not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
    )


def _open(kind: TypeProto) -> TypeProto:
    """The type without its shape: a segment takes any shape, as the whole model does."""
    if not kind.HasField("tensor_type"):
        return kind
    return helper.make_tensor_type_proto(kind.tensor_type.elem_type, None)
