"""SSD (Liu et al., ECCV 2016): on MobileNet-V2 as in TensorFlow's model zoo, on VGG16, and on ResNet-34.

The last one is for pictures of 1200 pixels, as in MLPerf's inference benchmark. MobileNet-V2: Sandler et al., CVPR
2018.

Six feature maps and heads of full 3x3 convolutions. On MobileNet-V2 additional maps come by depthwise separable ones:
16.818 million parameters once batch normalisation is folded into the convolutions. `SsdDetector` decodes the boxes and
lowers the scores of overlapping ones (Matrix NMS). It does so for all classes at once, or in a branch of the graph for
each class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.zoo import Definition, resnet
from bench.zoo.boxes import anchors, best_of_classes, decayed, decode, take
from bench.zoo.layers import LINEAR_GAIN, ConvNorm
from bench.zoo.mobile import InvertedResidual, mobilenet_v2_features
from bench.zoo.plain import vgg_features
from bench.zoo.seeding import gained

CLASSES, COCO_CLASSES, VOC_CLASSES = 91, 81, 21
"""COCO's ids, the 80 of them that are in use, and PASCAL VOC's, with the background as 0."""
SPLIT = 14
"""The block of MobileNet-V2's features with a wide part (576 channels, 1/16 of the size) that is the first map."""
ANCHORS = (3, 6, 6, 6, 6, 6)
EXTRAS = ((256, 512), (128, 256), (128, 256), (64, 128))
"""Per additional map: channels of its 1x1 convolution, and of the map."""


VGG_ANCHORS = (4, 6, 6, 6, 4, 4)
VGG_EXTRAS = ((256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
"""As `EXTRAS`, then stride and padding of the 3x3 convolution."""
VGG_SPLIT = 23
"""Of VGG16's layers: behind the third convolution of the fourth stage and its rectifier (38x38)."""


RESNET_EXTRAS = ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 2, 0), (128, 256, 1, 0))
RESNET_ANCHORS, RESNET_STRIDE = (4, 6, 6, 6, 4, 4), 3
"""Per cell of a head, and the step between a head's cells in those of its map."""

SIDES = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05)
"""Of the anchors by map, as shares of the picture's: those of SSD for COCO."""
MOVE, STRETCH = 10.0, 5.0
"""Of the deltas: SSD's variances of 0.1 and 0.2."""
CANDIDATES, DETECTIONS = 200, 100
"""Of a class, and those that come out."""


class Extra(nn.Sequential):
    """Halve a map: 1x1 to `narrow` channels, depthwise 3x3 at stride 2, 1x1 to `made`."""

    def __init__(self, taken: int, narrow: int, made: int) -> None:
        super().__init__(
            ConvNorm(taken, narrow, activation=nn.ReLU6),
            ConvNorm(narrow, narrow, 3, 2, groups=narrow, activation=nn.ReLU6),
            ConvNorm(narrow, made, activation=nn.ReLU6),
        )


class SsdMobileNet(nn.Module):
    """Picture [batch, 3, 300, 300] -> raw boxes [batch, 1917, 4] and class scores [batch, 1917, classes].

    Anchors in the order of maps (19x19 with 3 a cell, then 10, 5, 3, 2, 1 with 6), rows, columns. Boxes are steps from
    the anchors, scores are logits: decoding and the suppression of overlapping boxes are left to the client.
    """

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.classes = classes
        self.backbone = mobilenet_v2_features()
        widths = [576, 1280]
        self.extras = nn.ModuleList()
        for narrow, made in EXTRAS:
            self.extras.append(Extra(widths[-1], narrow, made))
            widths.append(made)
        self.boxes = nn.ModuleList(_head(width, count * 4) for width, count in zip(widths, ANCHORS, strict=True))
        self.scores = nn.ModuleList(_head(width, count * classes) for width, count in zip(widths, ANCHORS, strict=True))

    def maps(self, image: Tensor) -> list[Tensor]:
        """Return the six feature maps, the finest first."""
        x = image
        for block in list(self.backbone)[:SPLIT]:
            x = block(x)
        split = self.backbone[SPLIT]
        assert isinstance(split, InvertedResidual)
        wide = split.branch[0](x)
        x = split.branch[1:](wide)
        for block in list(self.backbone)[SPLIT + 1 :]:
            x = block(x)
        made = [wide, x]
        for extra in self.extras:
            made.append(extra(made[-1]))
        return made

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Predict for every anchor."""
        return _predict(self.maps(image), self.boxes, self.scores, self.classes)

    def anchors(self, side: int) -> Tensor:
        """Return the anchors [n, 4] for pictures of `side`, in pixels."""
        grids = [-(-side // 16)]
        for _ in ANCHORS[1:]:
            grids.append(-(-grids[-1] // 2))
        return _anchors(grids, ANCHORS, side)


class LengthNorm(nn.Module):
    """Bring the channels at each place to length 1, then scale each channel (Liu et al., ParseNet, section 3.2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, channels, 1, 1), 20.0))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return functional.normalize(x) * self.weight


class SsdVgg16(nn.Module):
    """SSD300: picture [batch, 3, 300, 300] -> raw boxes [batch, 8732, 4] and class scores [batch, 8732, classes].

    The head of VGG16 is two convolutions, the first with 3x3 taps at a distance of six pixels (section 3). A norm with
    a learnt scale brings the first map to length 20 at each place (section 3.1). Order and meaning as in
    `SsdMobileNet`, anchors: 38x38 with 4 a cell, 19, 10, 5 with 6, 3 and 1 with 4.
    """

    def __init__(self, classes: int = VOC_CLASSES) -> None:
        super().__init__()
        self.classes = classes
        layers = vgg_features((2, 2, 3, 3, 3))
        layers[16] = nn.MaxPool2d(2, ceil_mode=True)  # 75 rows become 38
        layers[-1] = nn.MaxPool2d(3, 1, 1)
        layers += [nn.Conv2d(512, 1024, 3, padding=6, dilation=6), nn.ReLU(), nn.Conv2d(1024, 1024, 1), nn.ReLU()]
        self.fine, self.coarse = nn.Sequential(*layers[:VGG_SPLIT]), nn.Sequential(*layers[VGG_SPLIT:])
        self.norm = gained(LengthNorm(512), 20 * math.sqrt(512))
        widths = [512, 1024]
        self.extras = _extras(widths, VGG_EXTRAS)
        sizes = list(zip(widths, VGG_ANCHORS, strict=True))
        self.boxes = nn.ModuleList(_head(width, count * 4) for width, count in sizes)
        self.scores = nn.ModuleList(_head(width, count * classes) for width, count in sizes)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Predict for every anchor."""
        fine = self.fine(image)
        maps = [self.norm(fine), self.coarse(fine)]
        for extra in self.extras:
            maps.append(extra(maps[-1]))
        return _predict(maps, self.boxes, self.scores, self.classes)


class SsdResNet34(nn.Module):
    """Picture [batch, 3, 1200, 1200] -> raw boxes [batch, 15130, 4] and class scores [batch, 15130, classes].

    ResNet-34 without its last stage, the third at stride 1; the heads look at every third cell of a map. Order and
    meaning as in `SsdMobileNet`, anchors: 50x50 with 4 a cell, 25, 13, 7 with 6, twice 3x3 with 4.
    """

    def __init__(self, classes: int = COCO_CLASSES, blocks: tuple[int, int, int] = (3, 4, 6)) -> None:
        super().__init__()
        self.classes = classes
        self.body = resnet.Features(blocks, bottleneck=False, strides=(1, 2, 1))
        widths = [self.body.channels]
        self.extras = _extras(widths, RESNET_EXTRAS)
        sizes = list(zip(widths, RESNET_ANCHORS, strict=True))
        self.boxes = nn.ModuleList(_head(width, count * 4, RESNET_STRIDE) for width, count in sizes)
        self.scores = nn.ModuleList(_head(width, count * classes, RESNET_STRIDE) for width, count in sizes)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Predict for every anchor."""
        maps = [self.body(image)]
        for extra in self.extras:
            maps.append(extra(maps[-1]))
        return _predict(maps, self.boxes, self.scores, self.classes)

    def anchors(self, side: int) -> Tensor:
        """Return the anchors [n, 4] for pictures of `side`, in pixels."""
        cells = [-(-side // 8)]
        for _, _, stride, padding in RESNET_EXTRAS:
            cells.append((cells[-1] + 2 * padding - 3) // stride + 1)
        return _anchors([-(-count // RESNET_STRIDE) for count in cells], RESNET_ANCHORS, side)


class SsdDetector(nn.Module):
    """Picture [batch, 3, side, side] -> boxes [batch, 100, 4], scores and labels [batch, 100], as `rcnn.FasterRcnn`.

    Of each class the best `CANDIDATES` anchors compete. `by_class`: in a branch of the graph for each class.
    """

    def __init__(self, raw: SsdMobileNet | SsdResNet34, side: int, *, by_class: bool) -> None:
        super().__init__()
        self.raw, self.side, self.by_class = raw, side, by_class
        self.register_buffer("anchors", raw.anchors(side))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Detect objects."""
        steps, logits = self.raw(image)
        boxes = decode(self.get_buffer("anchors"), steps, MOVE, STRETCH, self.side)
        log_scores = functional.log_softmax(logits, dim=2)[:, :, 1:]  # 0 is the background
        each = min(CANDIDATES, boxes.shape[1])
        kept: list[Tensor] = []
        scores: list[Tensor] = []
        if self.by_class:
            for number in range(self.raw.classes - 1):
                best, index = torch.topk(log_scores[:, :, number], each)
                kept.append(take(boxes, index))
                scores.append(decayed(kept[-1], best))
        else:
            best, index = torch.topk(log_scores.transpose(1, 2), each)
            kept.append(take(boxes, index.flatten(1)))
            lowered = decayed(torch.unflatten(kept[0], 1, (-1, each)).flatten(0, 1), best.flatten(0, 1))
            scores.append(torch.unflatten(lowered, 0, (-1, self.raw.classes - 1)).flatten(1))
        found, kept_scores, labels = best_of_classes(kept, scores, each, DETECTIONS)
        return found / self.side, kept_scores, labels


def _anchors(grids: Sequence[int], counts: Sequence[int], side: int) -> Tensor:
    """Anchors of square maps (Liu et al., section 2.2): of so many cells a side, and so many a cell."""
    made = []
    for grid, count, small, large in zip(grids, counts, SIDES, SIDES[1:], strict=False):
        stride, middle = side / grid, math.sqrt(small * large)
        shapes = [(small, 1.0), (small, 2.0), (small, 0.5), (middle, 1.0), (small, 3.0), (small, 1 / 3)][:count]
        ways = [anchors(grid, grid, stride, share * side, (aspect,), 0.5) for share, aspect in shapes]
        made.append(torch.stack(ways, dim=1).flatten(0, 1))
    return torch.cat(made)


def _extras(widths: list[int], sizes: Sequence[tuple[int, int, int, int]]) -> nn.ModuleList:
    """Additional maps; appends their channels to `widths`, which ends with those of the map before."""
    extras = nn.ModuleList()
    for narrow, made, stride, padding in sizes:
        square = nn.Conv2d(narrow, made, 3, stride, padding)
        extras.append(nn.Sequential(nn.Conv2d(widths[-1], narrow, 1), nn.ReLU(), square, nn.ReLU()))
        widths.append(made)
    return extras


def _predict(maps: list[Tensor], boxes: nn.ModuleList, scores: nn.ModuleList, classes: int) -> tuple[Tensor, Tensor]:
    """What the heads say of each map, one map after another."""
    steps = [_rows(head(x), 4) for head, x in zip(boxes, maps, strict=True)]
    logits = [_rows(head(x), classes) for head, x in zip(scores, maps, strict=True)]
    return torch.cat(steps, dim=1), torch.cat(logits, dim=1)


def _head(taken: int, made: int, stride: int = 1) -> nn.Conv2d:
    return gained(nn.Conv2d(taken, made, 3, stride, padding=1), LINEAR_GAIN)


def _rows(x: Tensor, width: int) -> Tensor:
    """[batch, anchors * width, height, columns] -> [batch, height * columns * anchors, width]."""
    return torch.unflatten(x.permute(0, 2, 3, 1).flatten(1), 1, (-1, width))


def definition(classes: int = CLASSES, side: int = 300) -> Definition:
    """Return the detector for square pictures of `side`."""
    return Definition(
        SsdMobileNet(classes),
        {"image": ("float32", (1, 3, side, side))},
        ("boxes", "scores"),
        "SSD-MobileNet-V2, an object detector; decoding is left to the client.",
        slo_ms=180,
    )


def vgg_definition(classes: int = VOC_CLASSES, side: int = 300) -> Definition:
    """Return SSD on VGG16 for square pictures of `side`; at less than 300 the last maps are lost, and it fails."""
    return Definition(
        SsdVgg16(classes),
        {"image": ("float32", (1, 3, side, side))},
        ("boxes", "scores"),
        "SSD300 on VGG16 (VOC), an object detector; decoding is left to the client.",
        slo_ms=2500,
    )


def detector_definition(
    raw: Callable[[], SsdMobileNet | SsdResNet34], name: str, side: int, slo_ms: int, *, by_class: bool
) -> Definition:
    """Return a detector with everything inside, on square pictures of `side`."""
    return Definition(
        SsdDetector(raw(), side, by_class=by_class),
        {"image": ("float32", (1, 3, side, side))},
        ("boxes", "scores", "labels"),
        f"{name}, an object detector{', suppression in a branch for each class' if by_class else ''}.",
        slo_ms=slo_ms,
        max_batch=2,
    )


_resnet34 = partial(detector_definition, SsdResNet34, "SSD on ResNet-34 at 1200 pixels", 1200, 20000)

DEFINITIONS: Mapping[str, Callable[[], Definition]] = {
    "ssd_mobilenet": definition,
    "ssd_mobilenet_by_class": partial(detector_definition, SsdMobileNet, "SSD-MobileNet-V2", 300, 380, by_class=True),
    "ssd_resnet34": partial(_resnet34, by_class=False),
    "ssd_resnet34_by_class": partial(_resnet34, by_class=True),
    "ssd_vgg16": vgg_definition,
}
