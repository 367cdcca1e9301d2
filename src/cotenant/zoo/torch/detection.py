"""SSD (Liu et al., ECCV 2016) on MobileNet-V2 (Sandler et al., CVPR 2018) as in TensorFlow's model zoo, and on VGG16.

Six feature maps and heads of full 3x3 convolutions. On MobileNet-V2 additional maps come by depthwise separable ones:
16.818 million parameters once batch normalisation is folded into the convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from cotenant.zoo.torch import Definition
from cotenant.zoo.torch.layers import LINEAR_GAIN, ConvNorm
from cotenant.zoo.torch.mobile import InvertedResidual, mobilenet_v2_features
from cotenant.zoo.torch.plain import vgg_features
from cotenant.zoo.torch.seeding import gained

CLASSES, VOC_CLASSES = 91, 21
"""COCO's ids and PASCAL VOC's with the background as 0."""
SPLIT = 14
"""Of MobileNet-V2's features: the block whose wide part (576 channels, 1/16 of the size) is the first map."""
ANCHORS = (3, 6, 6, 6, 6, 6)
EXTRAS = ((256, 512), (128, 256), (128, 256), (64, 128))
"""Per additional map: channels of its 1x1 convolution, and of the map."""


VGG_ANCHORS = (4, 6, 6, 6, 4, 4)
VGG_EXTRAS = ((256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
"""As `EXTRAS`, then stride and padding of the 3x3 convolution."""
VGG_SPLIT = 23
"""Of VGG16's layers: behind the third convolution of the fourth stage and its rectifier (38x38)."""


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

    The head of VGG16 is two convolutions, the first of 3x3 taps six pixels apart (section 3), and the first map is
    brought to length 20 at each place by a norm whose scale is learnt (section 3.1). Order and meaning as in
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
        self.extras = nn.ModuleList()
        for narrow, made, stride, padding in VGG_EXTRAS:
            square = nn.Conv2d(narrow, made, 3, stride, padding)
            self.extras.append(nn.Sequential(nn.Conv2d(widths[-1], narrow, 1), nn.ReLU(), square, nn.ReLU()))
            widths.append(made)
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


def _predict(maps: list[Tensor], boxes: nn.ModuleList, scores: nn.ModuleList, classes: int) -> tuple[Tensor, Tensor]:
    """What the heads say of each map, one map after another."""
    steps = [_rows(head(x), 4) for head, x in zip(boxes, maps, strict=True)]
    logits = [_rows(head(x), classes) for head, x in zip(scores, maps, strict=True)]
    return torch.cat(steps, dim=1), torch.cat(logits, dim=1)


def _head(taken: int, made: int) -> nn.Conv2d:
    return gained(nn.Conv2d(taken, made, 3, padding=1), LINEAR_GAIN)


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


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {"ssd_mobilenet": definition, "ssd_vgg16": vgg_definition}
