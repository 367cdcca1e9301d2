"""GoogLeNet and Inception-V3 without their auxiliary classifiers, which only training uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from bench.zoo import Definition
from bench.zoo.layers import ConvNorm, PooledClassifier, classifier

_unit = partial(ConvNorm, eps=1e-3)
_valid = partial(_unit, padding=0)


class Branches(nn.ModuleList):
    """Parallel branches of one input, concatenated along the channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Run every branch."""
        return torch.cat([branch(x) for branch in self], 1)


class Fork(nn.Sequential):
    """A chain that splits into two more branches at its end."""

    def __init__(self, *chain: nn.Module, ends: tuple[nn.Module, nn.Module]) -> None:
        super().__init__(*chain, Branches(ends))


def googlenet() -> PooledClassifier:
    """GoogLeNet (Szegedy et al., CVPR 2015, table 1) as the frameworks ship it.

    Normalised, and with 3x3 convolutions where the paper has 5x5.
    """

    def module(taken: int, one: int, reduce: int, three: int, reduce5: int, five: int, pooled: int) -> Branches:
        return Branches(
            (
                _unit(taken, one),
                nn.Sequential(_unit(taken, reduce), _unit(reduce, three, 3)),
                nn.Sequential(_unit(taken, reduce5), _unit(reduce5, five, 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _unit(taken, pooled)),
            )
        )

    halve = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)
    features = nn.Sequential(
        *(_unit(3, 64, 7, 2), halve(), _unit(64, 64), _unit(64, 192, 3), halve()),
        *(module(192, 64, 96, 128, 16, 32, 32), module(256, 128, 128, 192, 32, 96, 64), halve()),
        *(module(480, 192, 96, 208, 16, 48, 64), module(512, 160, 112, 224, 24, 64, 64)),
        *(module(512, 128, 128, 256, 24, 64, 64), module(512, 112, 144, 288, 32, 64, 64)),
        *(module(528, 256, 160, 320, 32, 128, 128), nn.MaxPool2d(2, 2, ceil_mode=True)),
        *(module(832, 256, 160, 320, 32, 128, 128), module(832, 384, 192, 384, 48, 128, 128)),
    )
    return PooledClassifier(features, 1024)


def _wide(taken: int, pooled: int) -> Branches:
    """35x35 (figure 5)."""
    return Branches(
        (
            _unit(taken, 64),
            nn.Sequential(_unit(taken, 48), _unit(48, 64, 5)),
            nn.Sequential(_unit(taken, 64), _unit(64, 96, 3), _unit(96, 96, 3)),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(taken, pooled)),
        )
    )


def _shrink_35(taken: int) -> Branches:
    """35x35 to 17x17 (figure 10)."""
    return Branches(
        (
            _valid(taken, 384, 3, 2),
            nn.Sequential(_unit(taken, 64), _unit(64, 96, 3), _valid(96, 96, 3, 2)),
            nn.MaxPool2d(3, 2),
        )
    )


def _factored(taken: int, width: int) -> Branches:
    """17x17, its 7x7 convolutions split into 1x7 and 7x1 (figure 6)."""
    row, column = (1, 7), (7, 1)
    return Branches(
        (
            _unit(taken, 192),
            nn.Sequential(_unit(taken, width), _unit(width, width, row), _unit(width, 192, column)),
            nn.Sequential(
                *(_unit(taken, width), _unit(width, width, column), _unit(width, width, row)),
                *(_unit(width, width, column), _unit(width, 192, row)),
            ),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(taken, 192)),
        )
    )


def _shrink_17(taken: int) -> Branches:
    """17x17 to 8x8."""
    return Branches(
        (
            nn.Sequential(_unit(taken, 192), _valid(192, 320, 3, 2)),
            nn.Sequential(
                *(_unit(taken, 192), _unit(192, 192, (1, 7)), _unit(192, 192, (7, 1))), _valid(192, 192, 3, 2)
            ),
            nn.MaxPool2d(3, 2),
        )
    )


def _spread(taken: int) -> Branches:
    """8x8, branches that end in two (figure 7)."""

    def ends() -> tuple[nn.Module, nn.Module]:
        return _unit(384, 384, (1, 3)), _unit(384, 384, (3, 1))

    return Branches(
        (
            _unit(taken, 320),
            Fork(_unit(taken, 384), ends=ends()),
            Fork(_unit(taken, 448), _unit(448, 384, 3), ends=ends()),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(taken, 192)),
        )
    )


def inception_v3() -> PooledClassifier:
    """Inception-V3 (Szegedy et al., CVPR 2016, table 1)."""
    features = nn.Sequential(
        *(_valid(3, 32, 3, 2), _valid(32, 32, 3), _unit(32, 64, 3), nn.MaxPool2d(3, 2)),
        *(_valid(64, 80), _valid(80, 192, 3), nn.MaxPool2d(3, 2)),
        *(_wide(192, 32), _wide(256, 64), _wide(288, 64), _shrink_35(288)),
        *(_factored(768, 128), _factored(768, 160), _factored(768, 160), _factored(768, 192), _shrink_17(768)),
        *(_spread(1280), _spread(2048)),
    )
    return PooledClassifier(features, 2048)


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {
    "googlenet": classifier(googlenet, "GoogLeNet, an image classifier.", 110),
    "inception_v3": classifier(inception_v3, "Inception-V3, an image classifier.", 450, (3, 299, 299)),
}
