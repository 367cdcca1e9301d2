"""The first run of a session, which is slower than the others: done before queries come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cotenant.execute.protocol import Shapes
from cotenant.execute.runner import Runner
from cotenant.execute.threads.names import Threads
from cotenant.graph.datatypes import numpy_type


def warm_up(model: Runner, ranges: Sequence[tuple[int, int]], threads: Threads, shapes: Shapes) -> None:
    """Run the model whole, and once through its segments where `ranges` has some, on zeros of these shapes.

    A model that refuses such inputs stays cold: that is no reason not to serve it.
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
    """An array of zeros, or of empty texts, of a type as models name it."""
    kind = numpy_type(dtype) or np.dtype(np.float32)
    return np.full(tuple(dims), "", np.object_) if kind.kind == "U" else np.zeros(tuple(dims), kind)
