"""Task graphs of the paper's wide detectors, and of ResNet-50, in a drawn world of a GPU and a CPU.

The graphs are made, not read from the paper's files: the same parts in the same sizes (ResNet with a pyramid of
features, a head of region proposals for each of five levels, heads of boxes and masks, non-maximum suppression unrolled
by class with about twenty small tasks for each), with the number of tasks and the fan-out of unrolled ones (2,063 and
2,170 tasks, fan-out 81). Times are calibrated to the paper: all on the GPU takes what its baseline does, small tasks
cost 8.1 us there and 7 us on the CPU (Table 2) at a launch cost of 8 us. Drawn for each world, log-uniformly: launch
cost, rate and latency of PCIe, speed of the CPU on small and on heavy tasks; and the number of the CPU's lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench.papers.sirplus._graphs import GraphWriter
from cotenant.plan.placement.task_graph import DeviceLink, GraphTask, TaskDevice, TaskGraph, TransferMode

CLASSES = 81
BASELINE_MS = {"faster_rcnn": 69.9, "mask_rcnn": 70.4, "ssd": 62.1, "resnet50": 7.0}
"""The paper's executions on one GPU; ResNet-50, which it does not time, as quick as such a GPU is."""
WIDE = ("faster_rcnn", "mask_rcnn", "ssd")
_SMALL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class DetectorWorld:
    """What a machine is like. `slower` is how much longer heavy tasks take on its CPU."""

    launch_us: float
    pcie_bytes_per_s: float
    copy_us: float
    cpu_small_us: float
    slower: float
    lanes: int
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
        )


class _Parts:
    """Writes the tasks of a detector: heavy ones by their share of the GPU's time, small ones."""

    def __init__(self) -> None:
        self.heavy: list[tuple[str, list[str], float, int]] = []
        self.rows: list[tuple[str, list[str], float | None, int, bool]] = []

    def conv(self, reads: list[str], share: float, size: float) -> str:
        return self._row(reads, share, size, False)

    def small(self, reads: list[str], size: float = _SMALL_BYTES, on_cpu: bool = False) -> str:
        return self._row(reads, None, size, on_cpu)

    def chain(self, reads: list[str], count: int, size: float = _SMALL_BYTES) -> str:
        last = self.small(reads, size)
        for _ in range(count - 1):
            last = self.small([last], size)
        return last

    def _row(self, reads: list[str], share: float | None, size: float, on_cpu: bool) -> str:
        name = f"n{len(self.rows)}"
        self.rows.append((name, reads, share, round(size), on_cpu))
        return name


def task_graph(model: str, world: DetectorWorld) -> TaskGraph:
    """A model's tasks in a world."""
    parts = _Parts()
    _MODELS[model](parts)
    small_gpu_us = world.launch_us + 0.1
    rows = parts.rows
    small_us = sum(small_gpu_us for *_, share, _, on_cpu in rows if share is None and not on_cpu)
    # At a launch cost of 8 us the sum is the paper's; other launch costs change small and heavy tasks alike.
    at_8_us = sum(8.1 for *_, share, _, on_cpu in rows if share is None and not on_cpu)
    shares = sum(share for *_, share, _, _ in rows if share is not None)
    heavy_us = BASELINE_MS[model] * 1000 - at_8_us
    assert heavy_us > 0
    assert small_us > 0
    lanes = [f"cpu{lane}" for lane in range(world.lanes)]
    writer = GraphWriter()
    for name, reads, share, size, on_cpu in rows:
        compute: dict[str, int] = {}
        launch = {}
        if share is None:
            # What is small reads what it must: large inputs cost the CPU their bytes at 10 GB/s.
            cpu_us = world.cpu_small_us + size / 1e4
            if not on_cpu:
                compute["gpu"] = 100
        else:
            gpu_us = heavy_us * share / shares
            cpu_us = world.slower * gpu_us
            compute["gpu"] = round(gpu_us * 1000)
        if "gpu" in compute:
            launch["gpu"] = round(world.launch_us * 1000) if share is None else 0
        compute |= {lane: round(cpu_us * 1000) for lane in lanes}
        # What a task occupies: its output, and weights as its share of 170 MB.
        held = size + (round(170e6 * share / shares) if share is not None else 0)
        writer.add(GraphTask(name, compute, launch, dict.fromkeys(compute, held)), reads, size)
    devices = (TaskDevice("gpu"), *(TaskDevice(lane, (), "host") for lane in lanes))
    ways = [("gpu", "host"), ("host", "gpu")]
    links = tuple(DeviceLink(*way, world.pcie_bytes_per_s, round(world.copy_us * 1000), "gpu") for way in ways)
    return TaskGraph(devices, tuple(writer.tasks), writer.tensors, links, {}, 0, world.transfers)


def _resnet(parts: _Parts, blocks: tuple[int, ...], convs: int, pixels: float, shapes: int) -> list[str]:
    """Stages of residual blocks; gives the last task of each. `shapes`: small tasks that read large features."""
    last = parts.conv([parts.small([], 12 * pixels)], 2.0, 64 * pixels)
    stages = []
    size = 256 * pixels
    for stage, count in enumerate(blocks):
        for block in range(count):
            shortcut = parts.conv([last], 1.0, size) if block == 0 and convs > 2 else last
            for step in range(convs):
                last = parts.conv([last], 1.0 if step != 1 else 1.6, size if step == convs - 1 else size / 4)
                if step < convs - 1:
                    last = parts.conv([last], 0.12, size / 4)
            last = parts.conv([last, shortcut], 0.25, size)
        for _ in range(shapes):
            parts.small([last], 64)
        stages.append(last)
        size /= 2 if stage < 3 else 1
    return stages


def _pyramid(parts: _Parts, stages: list[str], pixels: float) -> list[str]:
    levels: list[str] = []
    above = ""
    for number, stage in reversed(list(enumerate(stages))):
        size = 256 * pixels / 4**number
        lateral = parts.conv([stage], 1.0 / 2**number, size)
        if above:
            shape = parts.chain([lateral], 5, 64)  # sizes are computed from the features' shapes
            wide = parts.conv([above, shape], 0.1, size)
            lateral = parts.conv([lateral, wide], 0.15, size)
        above = lateral
        levels.insert(0, parts.conv([lateral], 3.0 / 4**number, size))
    levels.append(parts.conv([levels[-1]], 0.05, 256 * pixels / 256))
    return levels


def _proposals(parts: _Parts, levels: list[str], image: str, pixels: float) -> str:
    found = []
    for number, level in enumerate(levels):
        anchors = 3 * 4 * pixels / 4**number
        hidden = parts.conv([level], 3.0 / 4**number, 256 * pixels / 4**number)
        scores = parts.chain([parts.conv([hidden], 0.2 / 2**number, anchors)], 4, anchors)
        boxes = parts.chain([parts.conv([hidden], 0.3 / 2**number, 4 * anchors)], 4, 4 * anchors)
        anchors_of = parts.chain([image], 16, 4 * anchors)
        top = parts.conv([scores], 0.15, 8000)
        picked = [parts.chain([boxes, top, anchors_of], 2, 16_000)]
        corners = [parts.chain([picked[0]], 5) for _ in range(4)]
        joined = parts.chain(corners, 6, 16_000)
        kept = parts.conv([joined, top], 0.25, 8000)
        found.append(parts.chain([kept, joined], 4, 16_000))
    return parts.chain(found, 6, 16_000)


def _pooled(parts: _Parts, levels: list[str], proposals: str, share: float, size: float) -> str:
    areas = parts.chain([proposals], 10)
    pooled = []
    for level in levels[:4]:
        mine = parts.chain([areas, proposals], 5, 8000)
        pooled.append(parts.conv([level, mine], share / 4, size / 4))
    return parts.chain(pooled, 2, size)


def _classes(parts: _Parts, boxes: str, scores: str, count: int, steps: int) -> str:
    """Suppression unrolled: every class picks its column of the mask and its boxes, and suppresses."""
    mask = parts.small([scores], 81_000)
    ends = []
    for _ in range(count):
        column = parts.chain([mask], 4, 8000)
        mine = parts.chain([scores, column], 3, 4000)
        own = parts.chain([boxes, column], 3, 8000)
        kept = parts.small([mine, own])
        left = parts.chain([kept, own], (steps - 11) // 2)
        right = parts.chain([kept, mine], steps - 11 - (steps - 11) // 2)
        ends += [parts.small([left, right])]
    return parts.chain(ends, 8)


def _image(parts: _Parts, count: int) -> str:
    """Shapes and constants of the picture, which the baseline leaves on the CPU."""
    last = parts.small([], 64, on_cpu=True)
    for _ in range(count - 1):
        last = parts.small([last], 64, on_cpu=True)
    return last


def _rcnn(parts: _Parts, with_masks: bool) -> None:
    pixels = 4.0 * 200 * 304
    image = _image(parts, 30)
    stages = _resnet(parts, (3, 4, 6, 3), 3, pixels, 2)
    levels = _pyramid(parts, stages, pixels)
    proposals = _proposals(parts, levels, image, pixels)
    features = _pooled(parts, levels, proposals, 3.0, 1000 * 256 * 49 * 4 / 8)
    hidden = parts.conv([parts.conv([features], 5.0, 4_096_000)], 1.0, 4_096_000)
    scores = parts.chain([parts.conv([hidden], 0.2, 324_000)], 2, 324_000)
    boxes = parts.chain([parts.conv([hidden], 0.4, 1_296_000)], 25, 1_296_000)
    found = _classes(parts, boxes, scores, CLASSES, 18)
    if with_masks:
        pooled = _pooled(parts, levels, found, 1.0, 100 * 256 * 196)
        last = pooled
        for _ in range(4):
            last = parts.conv([last], 1.2, 100 * 256 * 196)
        parts.chain([parts.conv([last], 0.5, 100 * 81 * 784)], 52, 78_400)
    else:
        parts.chain([found], 3)


def _ssd(parts: _Parts) -> None:
    pixels = 4.0 * 300 * 300 / 4  # a fourth of the channels
    image = _image(parts, 20)
    stages = _resnet(parts, (3, 4, 6), 2, pixels, 2)
    last = stages[-1]
    scores, boxes = [], []
    for number in range(6):
        size = 256.0 * 50 * 50 * 4 / 4**number
        anchors = 15_130 / 2 ** (number + 1)
        scores.append(parts.chain([parts.conv([last], 2.0 / 2**number, anchors * 324)], 5, 600_000))
        boxes.append(parts.chain([parts.conv([last], 0.5 / 2**number, anchors * 16)], 5, 60_000))
        last = parts.conv([parts.conv([last], 0.5 / 2**number, size / 2)], 1.0 / 2**number, size / 4)
    joined = parts.chain(scores, 4, 4_900_000)
    decoded = parts.chain([*boxes, parts.chain([image], 12, 242_000)], 16, 242_000)
    _classes(parts, decoded, joined, CLASSES - 1, 18)


def _resnet50(parts: _Parts) -> None:
    stages = _resnet(parts, (3, 4, 6, 3), 3, 4.0 * 56 * 56 / 4, 0)
    parts.conv([parts.small([stages[-1]], 8192)], 0.2, 4000)


_MODELS: dict[str, Callable[[_Parts], None]] = {
    "faster_rcnn": lambda parts: _rcnn(parts, False),
    "mask_rcnn": lambda parts: _rcnn(parts, True),
    "ssd": _ssd,
    "resnet50": _resnet50,
}
