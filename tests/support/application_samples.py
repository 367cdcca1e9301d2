"""A repository of small models that work together: a chain, a diamond, and models to fail with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onnx_samples import Sketch, info, strings
from repositories import SLO_MS, chooser, config, scaled, write_model

Array = np.ndarray[Any, np.dtype[Any]]

CHAIN = """
[application]
slo_ms = {slo_ms}

[[application.stage]]
name = "first"
model = "twice"
inputs = {{ x = "x" }}

[[application.stage]]
name = "second"
model = "thrice"
inputs = {{ x = "first.y" }}

[application.outputs]
y = "second.y"
between = "first.y"
"""

DIAMOND = """
[application]
slo_ms = {slo_ms}
priority = 2

[[application.stage]]                  # not in order: the server finds it
name = "sum"
model = "join"
inputs = {{ left = "left.y", right = "right.y" }}

[[application.stage]]
name = "start"
model = "twice"
inputs = {{ x = "x" }}

[[application.stage]]
name = "left"
model = "thrice"
inputs = {{ x = "start.y" }}

[[application.stage]]
name = "right"
model = "half"
inputs = {{ x = "start.y" }}

[application.outputs]
total = "sum.total"
"""

FAILING = """
[application]
slo_ms = {slo_ms}

[[application.stage]]
name = "pick"
model = "chooser"
inputs = {{ index = "index" }}

[[application.stage]]
name = "slow"
model = "twice"
inputs = {{ x = "x" }}

[application.outputs]
picked = "pick.y"
y = "slow.y"
"""

WORDS = """
[application]
slo_ms = {slo_ms}

[[application.stage]]
name = "once"
model = "words"
inputs = {{ words = "words" }}

[[application.stage]]
name = "again"
model = "words"
inputs = {{ words = "once.same" }}

[application.outputs]
same = "again.same"
"""


def join() -> onnx.ModelProto:
    """Sum of two tensors of 8 columns; dynamic batch."""
    s = Sketch()
    s.op("Add", "left", "right", out="total")
    dims = ["batch", 8]
    return s.model([info("left", dims), info("right", dims)], [info("total", dims)])


def to_index() -> onnx.ModelProto:
    """Rows of 8 numbers to the index of the largest: INT64."""
    s = Sketch()
    s.op("ArgMax", "x", out="index", axis=1, keepdims=0)
    return s.model([info("x", ["batch", 8])], [info("index", ["batch"], TensorProto.INT64)])


MODELS: dict[str, tuple[str, Callable[[], onnx.ModelProto]]] = {
    "twice": (config(max_batch=4), lambda: scaled(2.0)),
    "thrice": (config(max_batch=8), lambda: scaled(3.0)),
    "half": (config("Owner of half", max_batch=4), lambda: scaled(0.5)),
    "join": (config(max_batch=4), join),
    "to_index": (config(max_batch=4), to_index),
    "chooser": (config(), chooser),
    "words": (config() + "[[model.shapes]]\nwords = [3]\n", strings),
}

APPLICATIONS = {"chain": CHAIN, "diamond": DIAMOND, "failing": FAILING, "wording": WORDS}


def write_models(root: Path, *names: str) -> Path:
    """The models, or those named."""
    for name in names or MODELS:
        text, make = MODELS[name]
        write_model(root, name, text, {1: make})
    return root


def fan(one: str, other: str) -> str:
    """The text of an application that asks two models at once."""
    stages = "".join(
        f'\n[[application.stage]]\nname = "{stage}"\nmodel = "{model}"\ninputs = {{{{ x = "x" }}}}\n'
        for stage, model in (("one", one), ("other", other))
    )
    return f'[application]\nslo_ms = {{slo_ms}}\n{stages}\n[application.outputs]\na = "one.y"\nb = "other.y"\n'


def write_application(root: Path, name: str, text: str, slo_ms: float = SLO_MS) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(text.format(slo_ms=slo_ms) if "{slo_ms}" in text else text, encoding="utf-8")


def softsign(x: Array) -> Array:
    """What `scaled` does before it multiplies."""
    out: Array = x / (1 + np.abs(x))
    return out


def chain(x: Array) -> tuple[Array, Array]:
    """What the chain gives: the end, and what lies between."""
    between = 2 * softsign(x)
    return 3 * softsign(between), between


def diamond(x: Array) -> Array:
    """What the diamond gives."""
    start = softsign(2 * softsign(x))
    total: Array = 3 * start + 0.5 * start
    return total


def x_of(seed: int = 0, rows: int = 1) -> Array:
    """Rows for the first models of the applications."""
    return np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float32)
