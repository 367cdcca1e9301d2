"""The models that are measured: zoo modules as archives on disk, opened once, with inputs of any batch."""

from __future__ import annotations

import json
import multiprocessing
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu._journal import MeasureError
from bench.gpu._tables import write_text
from cotenant.graph.dfg import Dfg, Unit

DEFAULT = ("resnet50", "bert_base", "mobilenet_v2", "densenet121", "inception_v3", "ssd_mobilenet")
HALF = "@fp16"
"""Ending of the names of models with weights and inputs in FP16, channels last."""
TINY = ("tiny_convolutions", "tiny_perceptron")
"""Of no use but to try everything out."""
SEED = 0
_MAC_BYTES = 1 / 15
"""Bytes that can be moved in the time of one multiply-accumulate, about, on a GPU: only how units compare matters."""
_UNIT_BYTES = 2_000_000
"""The same for what a unit costs whatever it does: one or two kernels."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Inputs of a model: element type and shape at batch 1 by name, and the number below which integers stay."""

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    limits: Mapping[str, int]
    batched: bool

    def feeds(self, items: int) -> dict[str, Any]:
        """Seeded arrays of a batch."""
        rng = np.random.default_rng(SEED)
        made: dict[str, Any] = {}
        for name, (dtype, shape) in self.inputs.items():
            full = (items, *shape[1:]) if self.batched else tuple(shape)
            if np.dtype(dtype).kind in "iub":
                made[name] = rng.integers(0, self.limits.get(name, 2), full).astype(dtype)
            else:
                made[name] = rng.standard_normal(full).astype(dtype)
        return made


@dataclass(slots=True)
class Subject:
    """A model that is open on the device."""

    name: str
    model: Any
    spec: Spec
    _feeds: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Number of its units."""
        return int(self.model.unit_count)

    def feeds(self, items: int) -> dict[str, Any]:
        """Inputs of a batch; the same arrays each time. Raises MeasureError for a batch that it cannot take."""
        if items > 1 and not self.spec.batched:
            raise MeasureError(f"{self.name} takes one row at a time")
        if items not in self._feeds:
            self._feeds[items] = self.spec.feeds(items)
        return self._feeds[items]

    def cuts(self, segments: int) -> tuple[int, ...]:
        """Boundaries from 0 to the last unit: so many segments of about the same cost; 0 stands for every unit."""
        return tuple(range(self.units + 1)) if segments == 0 else even_cuts(self.model.dfg, segments)


class Subjects:
    """Archives in a folder, made where they are missing, opened when they are asked for."""

    def __init__(self, folder: Path, device: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._folder = folder
        self._device = device
        self._open: dict[str, Subject] = {}

    def build(self, workers: int) -> dict[str, str]:
        """Make the archives that are missing, on several cores at once; give why some could not be made."""
        missing = [name for name in self.names if not self._spec_path(name).exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        if workers < 2 or len(missing) < 2:
            found = [_try_build(name, str(self._folder)) for name in missing]
        else:
            context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and CUDA's state
            with ProcessPoolExecutor(min(workers, len(missing)), mp_context=context) as pool:
                jobs = [pool.submit(_try_build, name, str(self._folder)) for name in missing]
                found = [_outcome(job) for job in jobs]
        return {name: why for name, why in zip(missing, found, strict=True) if why}

    def get(self, name: str) -> Subject:
        """Open a model. Raises MeasureError when it cannot be opened on the device."""
        if name not in self._open:
            if not self._spec_path(name).exists():
                raise MeasureError(f"{name} could not be built")
            from cotenant.execute.torch.model import TorchModel

            raw = json.loads(self._spec_path(name).read_text(encoding="utf-8"))
            inputs = {key: (dtype, tuple(shape)) for key, (dtype, shape) in raw["inputs"].items()}
            model = TorchModel.open(self._folder / f"{name}.pt2", name=name, device=self._device)
            self._open[name] = Subject(name, model, Spec(inputs, raw["limits"], raw["batched"]))
        return self._open[name]

    def close(self) -> None:
        """Let go of all models."""
        for subject in self._open.values():
            subject.model.close()
        self._open.clear()

    def _spec_path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def even_cuts(dfg: Dfg, segments: int) -> tuple[int, ...]:
    """Boundaries that part the estimated cost into `segments` about equal parts, cheap ones where there are any."""
    last = len(dfg.units)
    inner = sorted(dfg.cheap_cuts) or list(range(1, last))
    sums = [0.0]
    for unit in dfg.units:
        sums.append(sums[-1] + unit_cost(unit))
    chosen: list[int] = []
    for part in range(1, segments):
        goal = sums[-1] * part / segments
        at = bisect_left(inner, goal, key=lambda cut: sums[cut])
        near = [cut for cut in inner[max(0, at - 1) : at + 1] if cut not in chosen]
        if near:
            chosen.append(min(near, key=lambda cut: abs(sums[cut] - goal)))
    return (0, *sorted(chosen), last)


def unit_cost(unit: Unit) -> float:
    """Estimated cost of a unit, in bytes moved: products, traffic, and a constant for its kernels."""
    return unit.macs * _MAC_BYTES + unit.read_bytes + unit.write_bytes + unit.weight_bytes + _UNIT_BYTES


def _outcome(job: Future[str]) -> str:
    try:
        return job.result()
    except BrokenProcessPool:  # out of memory, most likely: the others are there, and the next run tries again
        return "the process that built it has died"


def _try_build(name: str, folder: str) -> str:
    """Make one archive; say why not, or nothing. Runs in a process of its own, or in this one."""
    try:
        if multiprocessing.parent_process() is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context in each of these processes would cost time and memory
        from bench.zoo import make, save_pt2

        plain_name = name.removesuffix(HALF)
        if plain_name in TINY:
            from bench.gpu._tiny import make_tiny

            model = make_tiny(plain_name)
        else:
            model = make(plain_name, SEED)
        if name != plain_name:
            import torch

            kinds = {"float32": "float16"}
            half = {key: (kinds.get(kind, kind), shape) for key, (kind, shape) in model.inputs.items()}
            module = model.module.half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            model = replace(model, module=module, inputs=half)
        path = Path(folder) / f"{name}.pt2"
        save_pt2(model, path)
        inputs = {key: [dtype, list(shape)] for key, (dtype, shape) in model.inputs.items()}
        spec = {"inputs": inputs, "limits": dict(model.limits), "batched": model.batched}
        write_text(Path(folder) / f"{name}.json", json.dumps(spec))  # whatever sees it finds a complete archive
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""
