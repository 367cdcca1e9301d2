"""Classifiers that are one chain: LeNet-5, AlexNet and VGG. Dropout, which only training uses, is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from bench.zoo import Definition
from bench.zoo.layers import CLASSES, classifier


class Chain(nn.Sequential):
    """Layers one after another; the picture is called `input`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the model's input
        """Classify."""
        value = input
        for layer in self:
            value = layer(value)
        return value


def lenet() -> Chain:
    """LeNet-5 (LeCun et al., Proceedings of the IEEE 1998) with all 6 x 16 connections of its second convolution."""
    return Chain(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.Tanh()),
        *(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
    )


def alexnet() -> Chain:
    """AlexNet on one device (Krizhevsky, arXiv:1404.5997): no groups, no local response normalisation."""
    return Chain(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *_head(256 * 6 * 6),
    )


def vgg_features(convolutions: tuple[int, ...]) -> list[nn.Module]:
    """VGG's convolutions without normalisation (Simonyan & Zisserman, ICLR 2015, table 1): so many before each
    pooling."""
    layers: list[nn.Module] = []
    taken = 3
    for count, width in zip(convolutions, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(taken, width, 3, padding=1), nn.ReLU()]
            taken = width
        layers.append(nn.MaxPool2d(2))
    return layers


def vgg(convolutions: tuple[int, ...]) -> Chain:
    """VGG with its head; see `vgg_features`."""
    return Chain(*vgg_features(convolutions), *_head(512 * 7 * 7))


def _head(taken: int) -> tuple[nn.Module, ...]:
    hidden = (nn.Flatten(), nn.Linear(taken, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU())
    return (*hidden, nn.Linear(4096, CLASSES))


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {
    "alexnet": classifier(alexnet, "AlexNet, an image classifier.", 130),
    "lenet": classifier(lenet, "LeNet-5, a classifier of digits.", 20, (1, 28, 28)),
    "vgg16": classifier(partial(vgg, (2, 2, 3, 3, 3)), "VGG-16, an image classifier.", 1100),
    "vgg19": classifier(partial(vgg, (2, 2, 4, 4, 4)), "VGG-19, an image classifier.", 1400),
}
