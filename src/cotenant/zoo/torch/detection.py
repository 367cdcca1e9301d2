"""SSD (Liu et al., ECCV 2016) on MobileNet-V2 (Sandler et al., CVPR 2018) as in TensorFlow's model zoo.

Six feature maps, heads of full 3x3 convolutions, additional maps by depthwise separable ones: 16.818 million parameters
once batch normalisation is folded into the convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from cotenant.zoo.torch import Definition
from cotenant.zoo.torch.layers import LINEAR_GAIN, ConvNorm
from cotenant.zoo.torch.mobile import InvertedResidual, mobilenet_v2_features
from cotenant.zoo.torch.seeding import gained

CLASSES = 91
"""COCO's ids with the background as 0."""
SPLIT = 14
"""Of MobileNet-V2's features: the block whose wide part (576 channels, 1/16 of the size) is the first map."""
ANCHORS = (3, 6, 6, 6, 6, 6)
EXTRAS = ((256, 512), (128, 256), (128, 256), (64, 128))
"""Per additional map: channels of its 1x1 convolution, and of the map."""


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
        maps = self.maps(image)
        boxes = [_rows(head(x), 4) for head, x in zip(self.boxes, maps, strict=True)]
        scores = [_rows(head(x), self.classes) for head, x in zip(self.scores, maps, strict=True)]
        return torch.cat(boxes, dim=1), torch.cat(scores, dim=1)


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


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {"ssd_mobilenet": definition}
