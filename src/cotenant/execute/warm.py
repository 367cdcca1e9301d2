"""Warm-up of sessions: their first run is slower than later ones, and happens before queries come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cotenant.execute.protocol import Shapes
from cotenant.execute.runner import Runner
from cotenant.execute.threads.names import Threads
from cotenant.graph.datatypes import numpy_type


def warm_up(model: Runner, ranges: Sequence[tuple[int, int]], threads: Threads, shapes: Shapes) -> None:
    """Run the whole model, and once through its segments if `ranges` has some, on zeros of these shapes.

    A model that refuses such inputs is served without warm-up.
    """
    units = model.unit_count
    chain = sorted(each for each in ranges if each != (0, units))
    try:
        inputs = {tensor.name: zeros(tensor.dtype, shapes[tensor.name]) for tensor in model.inputs}
        for steps in [[(0, units)], chain]:
            tensors: Mapping[str, Any] = inputs
            at = 0
            for start, end in steps:
                if start != at:
                    return
                tensors, at = model.run(start, end, tensors, threads), end
    except Exception:
        return


def zeros(dtype: str, dims: Sequence[int]) -> Any:
    """An array of zeros, or of empty texts, of a model's element type."""
    kind = numpy_type(dtype) or np.dtype(np.float32)
    return np.full(tuple(dims), "", np.object_) if kind.kind == "U" else np.zeros(tuple(dims), kind)
