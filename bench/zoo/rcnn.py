"""Faster R-CNN (Ren et al., NeurIPS 2015) and Mask R-CNN (He et al., ICCV 2017) on ResNet-50 with a feature pyramid.

The pyramid is that of Lin et al., CVPR 2017. Every shape is fixed: `PROPOSALS` boxes go to the second stage (as in Ren
et al., section 3.3) and `DETECTIONS` come out, however good they are. The papers suppress overlapping boxes one after
the other. Here Matrix NMS (Wang et al., NeurIPS 2020) lowers their scores in parallel, among the best `CANDIDATES` by
score. A client drops detections below a score of its choice.

The second stage does that for all classes at once or, `by_class`, in a branch of the graph for each class. Files of
older exporters do the latter (SIR+, SYSTOR 2022, section 2: fan-outs above 80). The answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.zoo import Definition, resnet
from bench.zoo.boxes import anchors, best_of_classes, decayed, decode, roi_align, take
from bench.zoo.layers import LINEAR_GAIN
from bench.zoo.seeding import gained
from cotenant.zoo.errors import ZooError

CANDIDATES, PROPOSALS, DETECTIONS = 1000, 300, 100
OUT = -1e9
"""The logarithm of the score of a box that is no candidate."""
LEVELS = (2, 3, 4, 5)
"""Of the pyramid: level l is 1 / 2 ** l of the picture's size; proposals also come from 6."""
MOVE, STRETCH = 10.0, 5.0
"""Of the second stage's deltas, as in Detectron."""


@dataclass(frozen=True, slots=True)
class RcnnShape:
    """Sizes: a square picture of `side` pixels, ResNet's blocks a stage, the pyramid's channels, the box head's.

    `by_class`: boxes are decoded and suppressed in a branch for each class.
    """

    side: int = 800
    blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    channels: int = 256
    hidden: int = 1024
    classes: int = 91
    by_class: bool = False


class Pyramid(nn.Module):
    """ResNet with lateral connections: a picture -> maps of levels 2 to 5 with as many channels each."""

    def __init__(self, blocks: tuple[int, int, int, int], channels: int) -> None:
        super().__init__()
        self.body = resnet.Features(blocks, bottleneck=True)
        self.lateral = nn.ModuleList(_linear_conv(4 * width, channels, 1) for width in resnet.WIDTHS)
        self.smooth = nn.ModuleList(_linear_conv(channels, channels, 3) for _ in resnet.WIDTHS)

    def forward(self, image: Tensor) -> list[Tensor]:
        """Add each coarser map to the next finer one, then smooth them all."""
        laterals = [lateral(x) for lateral, x in zip(self.lateral, self.body.pyramid(image), strict=True)]
        made = laterals[-1:]
        for x in reversed(laterals[:-1]):
            made.insert(0, x + functional.interpolate(made[0], scale_factor=2.0, mode="nearest"))
        return [smooth(x) for smooth, x in zip(self.smooth, made, strict=True)]


class Proposals(nn.Module):
    """Maps of levels 2 to 6 -> the best `PROPOSALS` boxes [batch, n, 4] of the region proposal network."""

    def __init__(self, side: int, channels: int) -> None:
        super().__init__()
        self.side = side
        self.shared = nn.Conv2d(channels, channels, 3, padding=1)
        self.objectness = _linear_conv(channels, 3, 1)
        self.deltas = gained(nn.Conv2d(channels, 12, 1), 0.25)  # untrained boxes stay near their anchors
        for level in (*LEVELS, 6):
            cells, stride = -(-side // 2**level), 2**level
            self.register_buffer(f"anchors{level}", anchors(cells, cells, stride, 8.0 * stride))

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Take the best of each level, lower the scores of overlapping ones, take the best of all."""
        starts: list[Tensor] = []
        steps: list[Tensor] = []
        bests: list[Tensor] = []
        for level, x in zip((*LEVELS, 6), maps, strict=True):
            shared = functional.relu(self.shared(x))
            score = self.objectness(shared).permute(0, 2, 3, 1).flatten(1)
            deltas = torch.unflatten(self.deltas(shared).permute(0, 2, 3, 1).flatten(1), 1, (-1, 4))
            start = self.get_buffer(f"anchors{level}")
            best, index = torch.topk(score, min(CANDIDATES, start.shape[0]))
            starts.append(functional.embedding(index, start))
            steps.append(take(deltas, index))
            bests.append(-functional.softplus(-best))  # logarithm of the sigmoid
        boxes = decode(torch.cat(starts, dim=1), torch.cat(steps, dim=1), 1.0, 1.0, self.side)
        levels = torch.split(boxes, [best.shape[1] for best in bests], dim=1)
        scores = torch.cat([decayed(some, best) for some, best in zip(levels, bests, strict=True)], dim=1)
        _, index = torch.topk(scores, min(PROPOSALS, boxes.shape[1]))
        return take(boxes, index)


class RegionFeatures(nn.Module):
    """Maps of levels 2 to 5 and boxes [batch, n, 4] -> features [batch * n, out, out, channels] by RoIAlign."""

    def __init__(self, side: int) -> None:
        super().__init__()
        sizes = torch.tensor([side // 2**level for level in LEVELS])
        cells = sizes * sizes
        self.register_buffer("sizes", sizes)
        self.register_buffer("starts", cells.cumsum(0) - cells)
        self.register_buffer("scales", torch.tensor([1 / 2**level for level in LEVELS]))

    def forward(self, maps: list[Tensor], boxes: Tensor, out: int) -> Tensor:
        """Sample each box from the map of its size: 224 pixels from level 4 (Lin et al., equation 1)."""
        cells = torch.cat([x.flatten(2) for x in maps], dim=2).transpose(1, 2)
        low, high = torch.split(boxes, 2, dim=-1)
        area = (high - low).prod(dim=-1)
        level = (4 + 0.5 * torch.log2(area.clamp(min=1.0) / 224**2)).floor().clamp(LEVELS[0], LEVELS[-1])
        index = level.to(torch.int64) - LEVELS[0]
        picture = torch.arange(boxes.shape[0], device=boxes.device).unsqueeze(1) * cells.shape[1]
        base = (self.get_buffer("starts")[index] + picture).flatten()
        size = self.get_buffer("sizes")[index].flatten()
        scale = self.get_buffer("scales")[index].flatten()
        return roi_align(cells.flatten(0, 1), boxes.flatten(0, 1), base, scale, size, size, out)


class BoxHead(nn.Module):
    """Maps and proposals -> `DETECTIONS` boxes [batch, k, 4], scores and labels [batch, k], the best first."""

    def __init__(self, shape: RcnnShape, regions: RegionFeatures) -> None:
        super().__init__()
        self.shape = shape
        self.regions = regions
        self.first = gained(nn.Linear(shape.channels * 49, shape.hidden), 2**0.5)
        self.second = gained(nn.Linear(shape.hidden, shape.hidden), 2**0.5)
        self.classes = nn.Linear(shape.hidden, shape.classes)
        self.deltas = nn.Linear(shape.hidden, shape.classes * 4)

    def forward(self, maps: list[Tensor], proposals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Classify all proposals, decode the best pairs of proposal and class, lower the scores of overlapping ones."""
        x = self.regions(maps, proposals, 7).flatten(1)
        x = functional.relu(self.second(functional.relu(self.first(x))))
        x = torch.unflatten(x, 0, (-1, proposals.shape[1]))
        log_scores = functional.log_softmax(self.classes(x), dim=2)[:, :, 1:]  # 0 is the background
        detect = self._each_class if self.shape.by_class else self._all_classes
        return detect(proposals, log_scores, self.deltas(x))

    def _all_classes(self, proposals: Tensor, log_scores: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = self.shape.classes
        best, index = torch.topk(log_scores.flatten(1), min(CANDIDATES, proposals.shape[1] * (count - 1)))
        proposal = torch.div(index, count - 1, rounding_mode="floor")
        labels = index - proposal * (count - 1) + 1
        deltas = take(torch.unflatten(deltas, 2, (count, 4)).flatten(1, 2), proposal * count + labels)
        boxes = decode(take(proposals, proposal), deltas, MOVE, STRETCH, self.shape.side)
        kept, order = torch.topk(decayed(boxes, best, labels), min(DETECTIONS, best.shape[1]))
        return take(boxes, order), kept.exp(), torch.gather(labels, 1, order)

    def _each_class(self, proposals: Tensor, log_scores: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `_all_classes`, in a branch a class: a worse box never lowers a candidate's score."""
        every = log_scores.flatten(1)
        worst = torch.topk(every, min(CANDIDATES, every.shape[1])).values[:, -1:].unsqueeze(2)
        log_scores = torch.where(log_scores < worst, OUT, log_scores)
        steps = torch.unflatten(deltas, 2, (self.shape.classes, 4))
        decoded = decode(proposals.unsqueeze(2), steps, MOVE, STRETCH, self.shape.side)
        boxes: list[Tensor] = []
        scores: list[Tensor] = []
        for label in range(1, self.shape.classes):
            best, index = torch.topk(log_scores[:, :, label - 1], proposals.shape[1])
            boxes.append(take(decoded[:, :, label], index))
            scores.append(decayed(boxes[-1], best))
        return best_of_classes(boxes, scores, proposals.shape[1], DETECTIONS)


class FasterRcnn(nn.Module):
    """Picture [batch, 3, side, side] -> boxes [batch, 100, 4], scores and labels [batch, 100].

    Boxes (left, top, right, bottom) are shares of the picture's side, 0 to 1. Labels (INT64) run from 1; scores fall
    along the second dimension and are already lowered for overlap.
    """

    def __init__(self, shape: RcnnShape = RcnnShape()) -> None:
        super().__init__()
        if shape.side % 32:
            raise ZooError(f"R-CNN: the picture's side is {shape.side}, expected a multiple of 32")
        self.side = shape.side
        self.pyramid = Pyramid(shape.blocks, shape.channels)
        self.proposals = Proposals(shape.side, shape.channels)
        self.regions = RegionFeatures(shape.side)
        self.boxes = BoxHead(shape, self.regions)

    def detect(self, image: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Return the pyramid's maps, boxes in pixels, scores and labels."""
        maps = self.pyramid(image)
        proposals = self.proposals([*maps, functional.max_pool2d(maps[-1], 1, stride=2)])
        boxes, scores, labels = self.boxes(maps, proposals)
        return maps, boxes, scores, labels

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Detect objects."""
        _, boxes, scores, labels = self.detect(image)
        return boxes / self.side, scores, labels


class MaskRcnn(FasterRcnn):
    """As `FasterRcnn`, and masks [batch, 100, 28, 28]: how likely each part of a box belongs to its object."""

    def __init__(self, shape: RcnnShape = RcnnShape()) -> None:
        super().__init__(shape)
        channels = shape.channels
        self.masks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4))
        self.grow = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.mask_classes = _linear_conv(channels, shape.classes, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Detect objects, then draw each one's mask."""
        maps, boxes, scores, labels = self.detect(image)
        x = self.regions(maps, boxes, 14).permute(0, 3, 1, 2)
        for conv in self.masks:
            x = functional.relu(conv(x))
        x = self.mask_classes(functional.relu(self.grow(x)))
        own = labels.reshape(-1, 1, 1, 1).expand(-1, 1, x.shape[2], x.shape[3])
        masks = torch.sigmoid(torch.gather(x, 1, own)).squeeze(1)
        return boxes / self.side, scores, labels, torch.unflatten(masks, 0, (-1, boxes.shape[1]))


def _linear_conv(taken: int, made: int, kernel: int) -> nn.Conv2d:
    return gained(nn.Conv2d(taken, made, kernel, padding=kernel // 2), LINEAR_GAIN)


def definition(kind: type[FasterRcnn], shape: RcnnShape = RcnnShape()) -> Definition:
    """Return the detector of this kind and shape."""
    masked = issubclass(kind, MaskRcnn)
    about = "Mask R-CNN, an instance segmenter" if masked else "Faster R-CNN, an object detector"
    return Definition(
        kind(shape),
        {"image": ("float32", (1, 3, shape.side, shape.side))},
        ("boxes", "scores", "labels", *(("masks",) if masked else ())),
        f"{about}{', suppression in a branch for each class' if shape.by_class else ''}.",
        slo_ms=(13000 if masked else 9000) + (4000 if shape.by_class else 0),
        max_batch=2,
    )


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {
    "faster_rcnn": partial(definition, FasterRcnn),
    "faster_rcnn_by_class": partial(definition, FasterRcnn, RcnnShape(by_class=True)),
    "mask_rcnn": partial(definition, MaskRcnn),
    "mask_rcnn_by_class": partial(definition, MaskRcnn, RcnnShape(by_class=True)),
}
