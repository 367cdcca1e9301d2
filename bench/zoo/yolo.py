"""Tiny YOLOv2 (Redmon & Farhadi, CVPR 2017; the authors' network for PASCAL VOC)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional

from bench.zoo import Definition

ANCHORS, CLASSES = 5, 20
WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 1024)


class TinyYoloV2(nn.Module):
    """Picture [batch, 3, 416, 416] -> raw grid [batch, 5 * (4 + 1 + classes), 13, 13].

    Per anchor of a cell: x, y, w, h, objectness and the classes' scores. Sigmoid, exponential, softmax and the
    suppression of overlapping boxes are left to the client.
    """

    def __init__(self, widths: tuple[int, ...] = WIDTHS, classes: int = CLASSES) -> None:
        super().__init__()
        taken = (3, *widths[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(into, out, 3, padding=1, bias=False) for into, out in zip(taken, widths, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.head = nn.Conv2d(widths[-1], ANCHORS * (5 + classes), 1)

    def forward(self, image: Tensor) -> Tensor:
        """Halve five times, pool once at stride 1, convolve twice more."""
        x = image
        for stage, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = functional.leaky_relu(norm(conv(x)), 0.1)
            if stage < 5:
                x = functional.max_pool2d(x, 2)
            elif stage == 5:  # windows of 2 at stride 1 that keep the size: padded on all sides, first ones dropped
                x = functional.max_pool2d(x, 2, stride=1, padding=1)[:, :, 1:, 1:]
        grid: Tensor = self.head(x)
        return grid


def definition(widths: tuple[int, ...] = WIDTHS, side: int = 416) -> Definition:
    """Return the detector for square pictures of `side`, a multiple of 32."""
    return Definition(
        TinyYoloV2(widths),
        {"image": ("float32", (1, 3, side, side))},
        ("grid",),
        "Tiny YOLOv2 (VOC), an object detector; decoding is left to the client.",
        slo_ms=300,
    )


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {"tiny_yolov2": definition}
