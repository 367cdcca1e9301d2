"""Random models with outputs that are early, constant, inputs, or one tensor twice, and a check of their answers."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onnx_samples import Sketch, info

WIDTH = 64
EXACT = ("a", "b", "same", "table")
"""Outputs that nothing computes."""
Arrays = dict[str, Any]


def random_ports(seed: int, *, constants: bool = True) -> onnx.ModelProto:
    """Products, sums and copies of two inputs, of which any may be an output, whether others read it or not."""
    rng = Random(seed)
    s = Sketch(seed)
    made = ["a", "b"]
    for at in range(rng.randint(4, 9)):
        kind = rng.choice(("MatMul", "MatMul", "MatMul", "Add", "Mul", "Tanh", "Identity", "Flatten"))
        first, second = (rng.choice(made[-5:]) for _ in range(2))
        match kind:
            case "MatMul":
                s.op(kind, first, s.weight(WIDTH, WIDTH), out=f"v{at}")
            case "Add" | "Mul":
                s.op(kind, first, second, out=f"v{at}")
            case _:
                s.op(kind, first, out=f"v{at}")
        made.append(f"v{at}")
    made.append(s.op("Identity", made[-1], out="again"))
    inner = made[2:-1]
    outputs = dict.fromkeys([*rng.sample(inner, rng.randint(1, len(inner))), made[-2], "again"])
    outputs |= dict.fromkeys(rng.sample(["a", "b"], rng.randint(0, 2)))
    dims = ["rows", WIDTH]
    ports = [info(name, dims) for name in outputs]
    if constants and rng.random() < 0.7:
        count = rng.choice((3, 2000))  # of which the larger one is not in the graph's file
        s.constant(np.arange(count, dtype=np.float32), "table")
        ports.append(info("table", [count]))
    rng.shuffle(ports)
    return s.model([info(name, dims) for name in "ab"], ports)


def port_feeds(seed: int, rows: int) -> Arrays:
    """Inputs of `random_ports`."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(rows, WIDTH)).astype(np.float32) for name in "ab"}


def onnx_answer(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Arrays:
    """What onnxruntime gives for the whole without optimisation, in memory of its own."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return {name: np.array(value) for name, value in zip(names, session.run(None, dict(feeds)), strict=True)}


def spoil(arrays: Mapping[str, Any]) -> list[Any]:
    """Collect free memory and write over blocks of such sizes as these arrays have. Keep the result meanwhile."""
    gc.collect()
    sizes = sorted({array.nbytes for array in arrays.values()})
    return [np.full(max(1, size + extra), 0x5A, np.uint8) for size in sizes for extra in (0, 64) for _ in range(40)]


def wrong_outputs(got: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What of an answer differs: names that are missing or too many, shapes, types, and numbers."""
    found = [f"{name} is missing" for name in expected if name not in got]
    found += [f"{name} is no output" for name in got if name not in expected]
    for name, right in expected.items():
        if name not in got:
            continue
        array = np.asarray(got[name])
        if (array.shape, array.dtype) != (right.shape, right.dtype):
            found.append(f"{name} is {array.shape} of {array.dtype}, expected {right.shape} of {right.dtype}")
        elif not (np.array_equal if name in EXACT else _are_close)(array, right):
            found.append(f"{name} differs in {int((~np.isclose(array, right, 1e-3, 1e-3)).sum())} of {right.size}")
    return found


def _are_close(array: Any, right: Any) -> bool:
    return bool(np.allclose(array, right, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(right).max(initial=0.0)))))
