"""Units of models on the GPU and on cores, and the bytes between them. Table: tasks.csv.

NAME... are the models. A row is one unit in one place: `ms` on the GPU is the time of the device, launched ahead of it;
on cores it is that of the call. `edges` has the bytes by producing unit (-1: an input).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from bench.gpu._models import Subjects
from bench.gpu._stats import median, plain
from bench.gpu.first._base import TASKS, Script
from bench.gpu.first._device import Cpu

CORES = (1, 4, 8)
_RUNS = 5
_AHEAD_CYCLES = 4_000_000
"""About 2 ms: the host submits some runs of a unit meanwhile."""


class Units:
    """A model with what lies at the edges of its units after a run over one row."""

    def __init__(self, script: Script, subject: Any, device: Any) -> None:
        self._script = script
        self.model, self.dfg = subject.model, subject.model.dfg
        self.values = {key: device.put(array) for key, array in subject.feeds(1).items()}
        self._given: list[Mapping[str, Any]] = []
        self._bytes = {key: value.nbytes for key, value in self.values.items()}
        self._made = dict.fromkeys(self.values, -1)
        values: Mapping[str, Any] = self.values
        for at, unit in enumerate(self.dfg.units):
            self._given.append(values)
            values = self.model.run(at, at + 1, values)
            self._bytes |= {key: value.nbytes for key, value in values.items()}
            self._made |= dict.fromkeys(unit.outputs, at)
        device.sync()

    def edges(self, at: int) -> dict[str, Any]:
        """Bytes that a unit reads of others, by unit, and that it makes."""
        read: dict[int, int] = {}
        unit = self.dfg.units[at]
        for name in unit.inputs:
            maker = self._made.get(name, -1)
            read[maker] = read.get(maker, 0) + self._bytes.get(name, 0)
        text = " ".join(f"{maker}:{size}" for maker, size in sorted(read.items()))
        return {"edges": text, "out_bytes": sum(self._bytes.get(name, 0) for name in unit.outputs)}

    def on_gpu(self, at: int) -> dict[str, Any]:
        """Median time of a unit on the device, submitted while the device is kept busy."""
        self.model.run(at, at + 1, self._given[at])
        device, marks = self._script.device, []
        device.sync()
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        marks.append(device.mark())
        for _ in range(_RUNS):
            self.model.run(at, at + 1, self._given[at])
            marks.append(device.mark())
        is_ahead = not marks[0].query()
        device.sync()
        times = [one.elapsed_time(other) for one, other in pairwise(marks)]
        return {"ms": plain(median(times)), "is_ahead": int(is_ahead), **self.edges(at)}

    def on_cores(self, at: int, cores: int) -> dict[str, Any]:
        """Median time of a unit on so many cores."""
        times = []
        for _ in range(_RUNS):
            began = time.perf_counter()
            self.model.run(at, at + 1, self._given[at], cores)
            times.append(1e3 * (time.perf_counter() - began))
            if times[-1] > 50:  # it says enough
                break
        return {"ms": plain(median(times)), **self.edges(at)}


def main() -> None:
    """Place by place, the GPU first; in each all units of all models."""
    script = Script(__doc__, 90.0)
    names = script.open(script.given or TASKS)
    table = script.table("tasks", "model unit what place ms is_ahead edges out_bytes")
    cores = [str(count) for count in CORES if count <= len(os.sched_getaffinity(0))]
    on_cpu = Subjects(script.models, "cpu", names)
    if not script.device.is_gpu:
        print("left out: units on a GPU, since there is none")
    for place in ["gpu", *cores] if script.device.is_gpu else cores:
        for name in names:
            if script.is_over():
                return
            try:
                subject = script.subject(name) if place == "gpu" else on_cpu.get(name)
                units = Units(script, subject, script.device if place == "gpu" else Cpu())
            except Exception as error:
                table.fail(error, model=name, place=place)
                continue
            for at, unit in enumerate(units.dfg.units):
                what = units.dfg.operators[unit.operators[0]].op_type
                measure = partial(units.on_gpu, at) if place == "gpu" else partial(units.on_cores, at, int(place))
                table.point(measure, model=name, unit=at, what=what, place=place)


if __name__ == "__main__":
    main()
