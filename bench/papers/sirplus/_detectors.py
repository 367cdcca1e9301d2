"""Task graphs of the wide detectors, and of ResNet-50, in a drawn world of a GPU and a CPU.

Operators and their inputs are from our own files (`_zoo_graphs.py`): Faster and Mask R-CNN and SSD on ResNet-34, with
suppression unrolled by class. They have 2,100 to 2,800 operators that compute, with fan-outs of 80 and 90. The paper's
files have 2,570 to 3,020 and 83. A task is an operator, as in the paper; views (reshapes) cost nothing.

Times are calibrated to the paper. On the GPU an operator takes the launch cost and a time by roofline, times one
factor. The roofline time is that of its multiply-adds and its bytes on the paper's card at its peak. The factor (1.4
for SSD to 2.1 for Faster R-CNN) gives all on the GPU the baseline's time at a launch cost of 8 us. On the CPU an
operator takes the sum of three times. One is that of small operators there (7 us by Table 2). The second is that of its
bytes at the rate of the processor. The third is that of its multiply-adds on the GPU, times the slowdown of the CPU.

In a class's branch the paper's files work on the some tens of boxes above a threshold, ours on all. There tensors are
taken to be small. Drawn for each world, log-uniformly: launch cost, rate and latency of PCIe, the CPU's time of small
operators, its rate and its slowdown. The number of its lanes, sets of its cores that share its rate, is drawn too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from random import Random

from bench.papers.sirplus._zoo_graphs import branches, computing, zoo_operators
from cotenant.techniques.placement.plan.task_graph import (
    DeviceLink,
    GraphTask,
    TaskDevice,
    TaskGraph,
    TransferMode,
)
from cotenant.techniques.placement.task_profile import UnitTensor

BASELINE_MS = {"faster_rcnn": 69.9, "mask_rcnn": 70.4, "ssd": 62.1, "resnet50": 7.0}
"""The paper's executions on one GPU; ResNet-50, which it does not time, as quick as such a GPU is."""
WIDE = ("faster_rcnn", "mask_rcnn", "ssd")
FILES = {
    "faster_rcnn": "faster_rcnn_by_class",
    "mask_rcnn": "mask_rcnn_by_class",
    "ssd": "ssd_resnet34_by_class",
    "resnet50": "resnet50",
}
CALIBRATED_LAUNCH_US = 8.0
_GPU_MACS_PER_S, _GPU_BYTES_PER_S = 8.15e12, 672e9
"""A Titan RTX at its peak."""
_BRANCH_BYTES = 4000
"""Of a tensor in a class's branch, at most."""


@dataclass(frozen=True, slots=True)
class DetectorWorld:
    """What a machine is like. `slower` is how much longer multiply-adds take on a lane of its CPU."""

    launch_us: float
    pcie_bytes_per_s: float
    copy_us: float
    cpu_small_us: float
    slower: float
    lanes: int
    cpu_bytes_per_s: float = 80e9
    transfers: TransferMode = TransferMode.LANE

    @classmethod
    def draw(cls, seed: int) -> DetectorWorld:
        """A plausible machine."""
        rng = Random(f"detectors {seed}")

        def between(low: float, high: float) -> float:
            return math.exp(rng.uniform(math.log(low), math.log(high)))

        return cls(
            between(5, 12),
            between(6e9, 24e9),
            between(5, 15),
            between(4, 10),
            between(10, 40),
            rng.choice((1, 2, 4)),
            between(50e9, 130e9),
        )


@dataclass(frozen=True, slots=True)
class DetectorTask:
    """An operator that computes: what it is, what it reads (row and output of it), and what it moves in all."""

    kind: str
    macs: int
    moved_bytes: int
    held_bytes: int
    reads: tuple[tuple[int, int], ...]
    output_bytes: tuple[int, ...]


@cache
def detector_tasks(model: str) -> tuple[DetectorTask, ...]:
    """The operators of a model that compute. Those of a class's branch work on few boxes: see above."""
    operators = computing(zoo_operators(FILES[model]))
    wide = frozenset[int]().union(*branches(operators)) if model in WIDE else frozenset[int]()
    made = []
    for number, op in enumerate(operators):
        sizes, weights = op.output_bytes, op.weight_bytes
        read = sum(operators[row].output_bytes[output] for row, output in op.reads)
        if number in wide:
            sizes, weights = tuple(min(size, _BRANCH_BYTES) for size in sizes), 0
            read = min(read, _BRANCH_BYTES * len(op.reads))  # of the scores and boxes of all classes only its own
        written = sum(sizes)
        made.append(DetectorTask(op.kind, op.macs, read + written + weights, written + weights, op.reads, sizes))
    return tuple(made)


def detector_units(model: str) -> list[int]:
    """The unit of each of `detector_tasks`."""
    return [op.unit for op in computing(zoo_operators(FILES[model]))]


@cache
def calibration(model: str) -> float:
    """How many times as long as at its peak the card takes, so that all on the GPU takes what the paper says."""
    tasks = detector_tasks(model)
    peak_us = sum(_peak_us(task.macs, task.moved_bytes) for task in tasks)
    factor = (BASELINE_MS[model] * 1000 - CALIBRATED_LAUNCH_US * len(tasks)) / peak_us
    assert factor > 1
    return factor


def _peak_us(macs: int, moved: int) -> float:
    return 1e6 * (macs / _GPU_MACS_PER_S + moved / _GPU_BYTES_PER_S)


def task_graph(model: str, world: DetectorWorld) -> TaskGraph:
    """A model's tasks in a world, in the order of its file."""
    factor = calibration(model)
    lanes = [f"cpu{lane}" for lane in range(world.lanes)]
    rate = world.cpu_bytes_per_s / world.lanes
    tasks = []
    sizes: dict[tuple[int, int], int] = {}
    readers: dict[tuple[int, int], list[int]] = {}
    for number, task in enumerate(detector_tasks(model)):
        name = f"{task.kind}{number}"
        cpu_us = world.cpu_small_us + 1e6 * task.moved_bytes / rate + world.slower * factor * _peak_us(task.macs, 0)
        compute = {"gpu": round(1000 * factor * _peak_us(task.macs, task.moved_bytes))}
        compute |= dict.fromkeys(lanes, round(1000 * cpu_us))
        held = dict.fromkeys(compute, task.held_bytes)
        tasks.append(GraphTask(name, compute, {"gpu": round(1000 * world.launch_us)}, held))
        sizes |= {(number, output): size for output, size in enumerate(task.output_bytes)}
        for read in task.reads:
            readers.setdefault(read, []).append(number)
    tensors = tuple(
        UnitTensor(f"{tasks[row].name}.{output}", row, tuple(numbers), sizes[row, output])
        for (row, output), numbers in sorted(readers.items())
    )
    devices = (TaskDevice("gpu"), *(TaskDevice(lane, (), "host") for lane in lanes))
    ways = [("gpu", "host"), ("host", "gpu")]
    links = tuple(DeviceLink(*way, world.pcie_bytes_per_s, round(world.copy_us * 1000), "gpu") for way in ways)
    return TaskGraph(devices, tuple(tasks), tensors, links, {}, 0, world.transfers)
