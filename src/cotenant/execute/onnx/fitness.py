"""Checks that an optimised graph runs wherever the original graph does.

onnxruntime's optimiser may remove a value that only the sub-graph of an If, Loop or Scan reads. The session then loads,
and fails at every run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import AttributeProto, TensorProto, helper

_PATIENCE_S = 5.0
"""Time limit of a trial run in seconds: a loop may never end on these inputs; then the trial says nothing."""
_FILLS = (0, 1)
"""Numbers that inputs are filled with. A condition that is an input is then tried both ways."""


def has_branches(model: onnx.ModelProto) -> bool:
    """Whether an operator of the model has a sub-graph."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    kinds = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    return any(attribute.type in kinds for node in nodes for attribute in node.attribute)


def is_fit(plain: ort.InferenceSession, others: Iterable[ort.InferenceSession], model: onnx.ModelProto) -> bool:
    """Whether the other sessions run on all trial inputs on which the plain session runs.

    Open dimensions are 1. Inputs that cannot be made, or that the plain session refuses, are skipped.
    """
    made = [feeds for feeds in (_feeds(model, fill) for fill in _FILLS) if feeds is not None]
    trials = [feeds for feeds in made if _runs(plain, feeds, endless=False)]
    return all(_runs(other, feeds, endless=True) for other in others for feeds in trials)


def _feeds(model: onnx.ModelProto, fill: int) -> dict[str, Any] | None:
    constants = {each.name for each in model.graph.initializer}
    made: dict[str, Any] = {}
    for info in model.graph.input:
        if info.name in constants:
            continue
        kind = info.type.tensor_type
        if kind.elem_type in (TensorProto.UNDEFINED, TensorProto.STRING) or not kind.HasField("shape"):
            return None
        dims = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in kind.shape.dim]
        made[info.name] = np.full(dims, fill, helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return made


def _runs(session: ort.InferenceSession, feeds: dict[str, Any], *, endless: bool) -> bool:
    """Whether a run ends without an error. `endless` is the result for a run that exceeds the time limit."""
    options = ort.RunOptions()
    options.log_severity_level = 4
    timer = threading.Timer(_PATIENCE_S, lambda: setattr(options, "terminate", True))
    timer.start()
    try:
        session.run(None, feeds, options)
    except Exception:  # onnxruntime's exceptions have no common base class
        return endless and options.terminate
    finally:
        timer.cancel()
    return True
