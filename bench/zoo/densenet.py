"""DenseNet (Huang et al., CVPR 2017, table 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from bench.zoo import Definition
from bench.zoo.layers import ConvNorm, PooledClassifier, classifier

BOTTLENECK = 4  # the 1x1 convolution makes so many times the growth


def _norm_conv(taken: int, made: int, kernel: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(taken, made, kernel, padding=kernel // 2, bias=False)
    return nn.BatchNorm2d(taken), nn.ReLU(), conv


class DenseLayer(nn.Sequential):
    """Appends `growth` channels to those it takes."""

    def __init__(self, taken: int, growth: int) -> None:
        wide = BOTTLENECK * growth
        super().__init__(*_norm_conv(taken, wide, 1), *_norm_conv(wide, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the inputs and the new features."""
        made = x
        for layer in self:
            made = layer(made)
        return torch.cat((x, made), 1)


def densenet(first: int, growth: int, blocks: tuple[int, int, int, int]) -> PooledClassifier:
    """A classifier with `first` channels after the stem and so many layers in its four dense blocks."""
    features = nn.Sequential(ConvNorm(3, first, 7, 2), nn.MaxPool2d(3, 2, 1))
    channels = first
    for number, count in enumerate(blocks):
        if number:
            features.extend((*_norm_conv(channels, channels // 2, 1), nn.AvgPool2d(2)))
            channels //= 2
        for _ in range(count):
            features.append(DenseLayer(channels, growth))
            channels += growth
    features.extend((nn.BatchNorm2d(channels), nn.ReLU()))
    return PooledClassifier(features, channels)


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {
    "densenet121": classifier(partial(densenet, 64, 32, (6, 12, 24, 16)), "DenseNet-121, an image classifier.", 220),
    "densenet161": classifier(partial(densenet, 96, 48, (6, 12, 36, 24)), "DenseNet-161, an image classifier.", 600),
}
