"""`python -m cotenant.zoo build DIR` makes the quick-start repository; `... measure DIR` times its models alone."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cotenant.zoo import QUICK_START, ZooError, build_repository, catalogue
from cotenant.zoo.graph import Array

MEASURE_S = 1.5  # per shape: at least a dozen runs of the slowest model


def _feed(shapes: dict[str, tuple[int, ...]], types: dict[str, str], rng: np.random.Generator) -> dict[str, Array]:
    """Random inputs will do: these models take the same time whatever the values."""
    feed: dict[str, Array] = {}
    for name, shape in shapes.items():
        if types[name] == "tensor(float)":
            feed[name] = rng.standard_normal(shape, np.float32)
        elif name == "attention_mask":
            feed[name] = np.ones(shape, np.int64)
        else:
            dtype = np.int32 if types[name] == "tensor(int32)" else np.int64
            feed[name] = rng.integers(0, 256, shape).astype(dtype)
    return feed


def _measure(root: Path, models: Sequence[str]) -> None:
    """Print median latencies of one session with one thread, at every declared shape, batch 1 and the largest batch."""
    import onnxruntime as ort

    rng = np.random.default_rng(0)
    print(f"onnxruntime {ort.__version__}, one intra-op thread, median of the runs of {MEASURE_S} s")
    print(f"{'model':16} {'first input':20} {'batch':>5} {'ms':>8} {'least ms':>8} {'SLO ms':>7}")
    for model in models:
        spec = catalogue.entry(model)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        session = ort.InferenceSession(root / model / "1" / "model.onnx", options, providers=["CPUExecutionProvider"])
        types = {i.name: i.type for i in session.get_inputs()}
        for declared in spec.shapes:
            for batch in sorted({1, spec.max_batch}):
                shapes = dict(declared) if batch == 1 else {k: (batch, *v[1:]) for k, v in declared.items()}
                feed = _feed(shapes, types, rng)
                session.run(None, feed)
                taken_ns: list[int] = []
                while sum(taken_ns) < MEASURE_S * 1e9:
                    start_ns = time.perf_counter_ns()
                    session.run(None, feed)
                    taken_ns.append(time.perf_counter_ns() - start_ns)
                shape = "x".join(map(str, next(iter(shapes.values()))))
                median_ms, least_ms = statistics.median(taken_ns) / 1e6, min(taken_ns) / 1e6
                print(f"{model:16} {shape:20} {batch:5} {median_ms:8.2f} {least_ms:8.2f} {spec.slo_ms:7}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two commands; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cotenant.zoo", description=__doc__)
    parser.add_argument("command", choices=("build", "measure"))
    parser.add_argument("directory", type=Path, help="the model repository")
    parser.add_argument("models", nargs="*", help=f"default: {' '.join(QUICK_START)}")
    given = parser.parse_args(arguments)
    try:
        build_repository(given.directory, models=given.models or None, progress=print)
        if given.command == "measure":
            _measure(given.directory, given.models or QUICK_START)
    except ZooError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
