"""Whether an optimised graph runs where the graph that it was made of does.

onnxruntime's optimiser sometimes takes away a value that only the sub-graph of an If, Loop or Scan still reads: the
session loads, and fails at every run.
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
"""A loop may never end on inputs that nobody would send: then nothing is known of it."""
_FILLS = (0, 1)
"""What inputs are made of. A condition that is an input then goes both ways."""


def has_branches(model: onnx.ModelProto) -> bool:
    """Whether some operator of the model has a sub-graph."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    kinds = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    return any(attribute.type in kinds for node in nodes for attribute in node.attribute)


def is_fit(plain: ort.InferenceSession, others: Iterable[ort.InferenceSession], model: onnx.ModelProto) -> bool:
    """Whether each of the other sessions runs on the inputs that the plain one takes, out of some that are made up.

    Open dimensions are 1. Inputs that cannot be made, or that the plain one refuses, say nothing.
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
    """Whether a run ends well; `endless` is what one that does not end in time counts as."""
    options = ort.RunOptions()
    options.log_severity_level = 4
    timer = threading.Timer(_PATIENCE_S, lambda: setattr(options, "terminate", True))
    timer.start()
    try:
        session.run(None, feeds, options)
    except Exception:  # onnxruntime's own classes share no base
        return endless and options.terminate
    finally:
        timer.cancel()
    return True
