"""Latencies of single units, read from the engine's own timing of each operator."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime as ort

from cotenant.execute.onnx.segment_session import session_options
from cotenant.graph.dfg import Dfg

_RUNS = 6
_WARM_UP = 2
_KERNEL = "_kernel_time"


def unit_times(graph_path: Path, dfg: Dfg, inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Median latency of each unit in ns, one thread. Units that the engine does not time get what their MACs suggest.

    The optimised graph is run with the engine's profiler on; operators are matched by their place in that graph.
    """
    operators = _operator_ns(graph_path, inputs)
    latencies = [sum(operators.get(index, 0.0) for index in unit.operators) for unit in dfg.units]
    timed = sum(latencies)
    if timed <= 0:
        return tuple(max(1, unit.macs) for unit in dfg.units)
    return tuple(max(1, round(ns)) for ns in latencies)


def _operator_ns(graph_path: Path, inputs: Mapping[str, Any]) -> dict[int, float]:
    with tempfile.TemporaryDirectory(prefix="cotenant-profile-") as folder:
        options = session_options(1, optimise=False)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "units")
        session = ort.InferenceSession(str(graph_path), options, providers=["CPUExecutionProvider"])
        for _ in range(_WARM_UP + _RUNS):
            session.run(None, dict(inputs))
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    samples: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            samples[int(event["args"]["node_index"])].append(event["dur"] * 1000.0)
    return {index: median(values[_WARM_UP:] or values) for index, values in samples.items()}
