"""What the image classifiers share: a convolution with its normalisation, and the usual inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from bench.zoo import Definition
from bench.zoo.seeding import gained

CLASSES = 1000
LINEAR_GAIN = math.sqrt(0.5)  # seeding allows for a rectifier, which halves the power
SMOOTH_GAIN = 1.2  # SiLU and hard swish keep 0.36 of a unit normal's power
SMOOTH = (nn.SiLU, nn.Hardswish)


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch normalisation and activation; padded so that stride 1 keeps the size."""

    def __init__(
        self,
        taken: int,
        made: int,
        kernel: int | tuple[int, int] = 1,
        stride: int = 1,
        *,
        padding: int | tuple[int, int] | None = None,
        groups: int = 1,
        activation: Callable[[], nn.Module] | None = nn.ReLU,
        gain: float = 1.0,
        eps: float = 1e-5,
    ) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        if padding is None:
            padding = (height // 2, width // 2)
        conv = nn.Conv2d(taken, made, (height, width), stride, padding, groups=groups, bias=False)
        norm = nn.BatchNorm2d(made, eps=eps)
        if activation is None:
            super().__init__(gained(conv, gain * LINEAR_GAIN), norm)
        else:
            fitting = SMOOTH_GAIN if activation in SMOOTH else 1.0
            super().__init__(gained(conv, gain * fitting), norm, activation())


class PooledClassifier(nn.Module):
    """Picture [batch, 3, height, width] -> `logits` [batch, 1000]: features, their mean, a head."""

    def __init__(self, features: nn.Module, channels: int, *head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(*head) if head else nn.Linear(channels, CLASSES)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the model's input
        """Classify."""
        logits: Tensor = self.classifier(self.pool(self.features(input)).flatten(1))
        return logits


def classifier(
    module: Callable[[], nn.Module], about: str, slo_ms: int, shape: tuple[int, int, int] = (3, 224, 224)
) -> Callable[[], Definition]:
    """A definition with one picture `input` and the scores `logits`."""
    return partial(_classifier, module, about, slo_ms, shape)


def _classifier(module: Callable[[], nn.Module], about: str, slo_ms: int, shape: tuple[int, int, int]) -> Definition:
    return Definition(module(), {"input": ("float32", (1, *shape))}, ("logits",), about, slo_ms=slo_ms)
