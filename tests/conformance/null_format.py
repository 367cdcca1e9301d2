"""A whole engine in a few lines: it gives its input back after a fixed time. What a format has to bring along."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cotenant.graph.dfg import Boundary, Dfg, Tensor, Unit
from cotenant.repository.formats import Format

NULL = Format(".null", "null_format", "null_format:Null", "null", "null", "nothing")


class Null:
    """Its file says how many milliseconds it takes."""

    uncut_reason = "there is nothing to cut"
    kernels = ""
    unit_count = 1

    def __init__(self, path: Path, *, cache_dir: Path | None, name: str, device: str, content: str) -> None:
        self.path, self.name, self.graph_path, self.files = path, name, path, (path,)
        self._takes_s = float(path.read_text()) / 1e3
        self.inputs = (Tensor("x", "tensor(float)", ("batch", 4)),)
        self.outputs = (Tensor("y", "tensor(float)", ("batch", 4)),)
        ends = (Boundary(0, ("x",), 16, True), Boundary(1, ("y",), 16, True))
        units = (Unit(0, (), ("x",), ("y",), 1, 16, 16, 0),)
        self.dfg = Dfg(name, (), units, ends, self.inputs, self.outputs, {"x": self.inputs[0], "y": self.outputs[0]})

    def suggest_cuts(self, weights: Sequence[float], max_weight: float) -> tuple[int, ...]:
        return (0, 1)

    def dfg_at(self, shapes: Mapping[str, Sequence[int]]) -> Dfg:
        return self.dfg

    def unit_ns(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        return (round(self._takes_s * 1e9),)

    def prepare(self, ranges: Iterable[tuple[int, int]], threads: object = 1) -> None: ...

    def keep(self, threads: Iterable[object]) -> None: ...

    def run(self, start: int, end: int, tensors: Mapping[str, Any], threads: object = 1) -> dict[str, Any]:
        time.sleep(self._takes_s)
        return {"y": tensors["x"]}

    def close(self) -> None: ...

    def __enter__(self) -> Null:
        return self

    def __exit__(self, *_: object) -> None: ...
