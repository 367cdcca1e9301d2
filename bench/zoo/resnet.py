"""ResNet (He et al., CVPR 2016, table 1), the stride in the 3x3 convolutions as the frameworks build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from bench.zoo import Definition
from bench.zoo.layers import ConvNorm, PooledClassifier, classifier

WIDTHS = (64, 128, 256, 512)


class Block(nn.Module):
    """Two 3x3 convolutions or, as a bottleneck, 1x1, 3x3 and 1x1 to four times the width, beside a shortcut."""

    def __init__(self, taken: int, width: int, stride: int, *, bottleneck: bool, gain: float = 1.0) -> None:
        super().__init__()
        made = 4 * width if bottleneck else width
        if bottleneck:
            self.branch = nn.Sequential(
                ConvNorm(taken, width),
                ConvNorm(width, width, 3, stride),
                ConvNorm(width, made, activation=None, gain=gain),
            )
        else:
            self.branch = nn.Sequential(
                ConvNorm(taken, width, 3, stride), ConvNorm(width, made, 3, activation=None, gain=gain)
            )
        same = stride == 1 and taken == made
        self.shortcut: nn.Module = nn.Identity() if same else ConvNorm(taken, made, 1, stride, activation=None)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to the shortcut."""
        made: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return made


class Features(nn.Module):
    """Picture [batch, 3, height, width] -> the outputs of the last stage, with the usual `strides` 1/32 of the size."""

    def __init__(self, blocks: tuple[int, ...], *, bottleneck: bool, strides: tuple[int, ...] = (1, 2, 2, 2)) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.channels = 64
        self.stages = nn.ModuleList()
        for count, width, first in zip(blocks, WIDTHS, strides, strict=False):
            stage = nn.Sequential()
            gain = count**-0.5  # the branches of a stage together add about what the shortcut carries
            for index in range(count):
                stride = 1 if index else first
                stage.append(Block(self.channels, width, stride, bottleneck=bottleneck, gain=gain))
                self.channels = 4 * width if bottleneck else width
            self.stages.append(stage)

    def pyramid(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all stages, usually 1/4, 1/8, 1/16 and 1/32 of the size."""
        made: list[Tensor] = []
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            made.append(x)
        return tuple(made)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last stage."""
        return self.pyramid(x)[-1]


def resnet(blocks: tuple[int, int, int, int], *, bottleneck: bool) -> PooledClassifier:
    """A classifier with so many blocks in its four stages."""
    features = Features(blocks, bottleneck=bottleneck)
    return PooledClassifier(features, features.channels)


def _definition(depth: int, blocks: tuple[int, int, int, int], slo_ms: int) -> Callable[[], Definition]:
    about = f"ResNet-{depth}, an image classifier."
    return classifier(partial(resnet, blocks, bottleneck=depth >= 50), about, slo_ms)


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {
    "resnet18": _definition(18, (2, 2, 2, 2), 125),
    "resnet34": _definition(34, (3, 4, 6, 3), 250),
    "resnet50": _definition(50, (3, 4, 6, 3), 280),
    "resnet101": _definition(101, (3, 4, 23, 3), 520),
    "resnet152": _definition(152, (3, 8, 36, 3), 870),
}
