"""Measures tasks of a torch model in a share of a GPU and on the cores beside it. No part of this has run on a GPU.

- Device: the time of the whole as served, less an empty launch, is divided among the units in proportion to their event
  times. Captured units run closer together than units with events between them.
- Cores: the time of a call of each unit's function, as in tasks of a placement.
- Copies: rate and latency from times at two sizes, measured as launches make copies.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import msgspec
import numpy as np

from cotenant.execute.core_target import CoreTarget
from cotenant.execute.gpu.stream_target import StreamTarget
from cotenant.execute.protocol import LoadSpec
from cotenant.execute.runner import Runner
from cotenant.measure.campaign import Journal, OnStep
from cotenant.measure.inputs import make_inputs
from cotenant.measure.opened_model import OpenedModel
from cotenant.measure.solo import Effort, in_turns
from cotenant.techniques.placement.execute.placed_torch import copy_times
from cotenant.techniques.placement.measure.tasks import chain_times, divided, hand_over_ns, tensors_of_run
from cotenant.techniques.placement.task_profile import CopyTimes, DeviceTimes, ModelTasks, UnitTensor
from cotenant.work import Share

_SIZES = (4 << 10, 4 << 20)
_COPY_RUNS = 30
_STEPS = 7


def measure_beside(
    opened: OpenedModel,
    twin: Runner,
    share: Share,
    target: StreamTarget,
    effort: Effort,
    journal: Journal,
    on_step: OnStep,
) -> ModelTasks:
    """Measure a model in a share of the target device, and its host twin on a core. Finished steps are kept."""
    model, count = opened.runner, opened.runner.unit_count
    shape, max_batch = opened.sweep((share,), effort).largest_shape, opened.found.config.model.max_batch
    inputs = make_inputs(model.inputs, shape, 1, max_batch > 1, opened.samples)
    core, whole = Share(target.cores[:1]), [(0, count)]
    done = 0

    def step(name: str, work: Any, words: str) -> Any:
        nonlocal done
        on_step(done, _STEPS, f"{opened.found.tenant}: {words}")
        done += 1
        return journal.remember(f"{opened.digest}/sms{share.size}/{name}", work)

    def on_gpu() -> list[int]:
        spec = LoadSpec((share,), (0, count), (shape,), max_batch, rows=(1,))
        with target.ready(model, spec) as run:
            return in_turns((partial(run, share, inputs, whole),), effort)[0].latency_ns

    def on_core() -> list[list[int]]:
        with CoreTarget().at(core):
            return [list(chain_times(twin, inputs, whole, 1)[0]) for _ in range(effort.warm_up + effort.min_runs)]

    weights = step("gpu-units", lambda: list(target.unit_ns(model, inputs, share)), f"units on {share.device}")
    units = step("core-units", lambda: list(CoreTarget().unit_ns(twin, inputs, core)), "units on a core")
    floor = step("floor", lambda: target.floor_ns(share), "launches")
    wholes = step("wholes", lambda: [on_gpu(), on_core()], "the whole")
    hand_over = step("hand-over", partial(hand_over_ns, Share(target.cores)), "hand-overs")
    copies = step("copies", lambda: [_copy_ns(target, share, size) for size in _SIZES], "copies")
    tensors = step("tensors", lambda: msgspec.to_builtins(tensors_of_run(twin, inputs)), "tensors")
    on_step(_STEPS, _STEPS, "")
    low, middle, high = np.percentile(wholes[0], (25, 50, 75))
    times = np.array(wholes[1][effort.warm_up :])
    whole_ns, core_ns = max(1, round(low)), max(1, round(np.percentile(times[:, 1], 25)))
    down, up = (_copies(small, large) for small, large in zip(*copies, strict=True))
    return ModelTasks(
        opened.digest,
        opened.runner.files[0].parent.name,
        len(target.cores),
        model.dfg.unit_names,
        msgspec.convert(tensors, tuple[UnitTensor, ...]),
        DeviceTimes(tuple(units), 0, core_ns),
        DeviceTimes(divided(weights, (0, count), (whole_ns,), floor), min(floor, whole_ns), whole_ns),
        hand_over,
        round(float((high - low) / 1.349 / middle), 4),
        round(float(times[:, 0].sum() / max(1, times[:, 1].sum())), 4),
        share.size,
        down,
        up,
    )


def _copy_ns(target: StreamTarget, share: Share, size_bytes: int) -> tuple[int, int]:
    """Median time in ns of a copy to the host, and to the device, including the detection of its end."""
    down, up = target.do(share, lambda streams: copy_times(streams, size_bytes, _COPY_RUNS))
    return round(median(down)), round(median(up))


def _copies(small_ns: int, large_ns: int) -> CopyTimes:
    """Rate and latency from the times at two sizes."""
    ns_per_byte = max(1, large_ns - small_ns) / (_SIZES[1] - _SIZES[0])
    return CopyTimes(1e9 / ns_per_byte, max(0, round(small_ns - _SIZES[0] * ns_per_byte)))
