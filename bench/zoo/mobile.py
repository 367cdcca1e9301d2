"""Classifiers of inverted residuals: MobileNet-V2 and -V3, MnasNet, EfficientNet-B0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from bench.zoo import Definition
from bench.zoo.layers import CLASSES, LINEAR_GAIN, ConvNorm, PooledClassifier, classifier
from bench.zoo.seeding import gained

Activation = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Inverted:
    """One inverted residual: 1x1 to `wide` channels, depthwise `kernel`, excitation of `squeezed` channels, 1x1."""

    taken: int
    wide: int
    made: int
    kernel: int
    stride: int
    squeezed: int = 0
    activation: Activation = nn.ReLU
    gate: Activation = nn.Sigmoid
    squeeze: Activation = nn.ReLU


class Excitation(nn.Module):
    """Weights channels by what the whole picture holds (Hu et al., CVPR 2018)."""

    def __init__(self, channels: int, squeezed: int, squeeze: Activation, gate: Activation) -> None:
        super().__init__()
        self.weights = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            squeeze(),
            gained(nn.Conv2d(squeezed, channels, 1), LINEAR_GAIN),
            gate(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels."""
        scaled: Tensor = x * self.weights(x)
        return scaled


class InvertedResidual(nn.Module):
    """The block of `Inverted`, with a shortcut where input and output have one shape."""

    def __init__(self, of: Inverted) -> None:
        super().__init__()
        self.residual = of.stride == 1 and of.taken == of.made
        self.branch = nn.Sequential()
        if of.wide != of.taken:
            self.branch.append(ConvNorm(of.taken, of.wide, activation=of.activation))
        self.branch.append(ConvNorm(of.wide, of.wide, of.kernel, of.stride, groups=of.wide, activation=of.activation))
        if of.squeezed:
            self.branch.append(Excitation(of.wide, of.squeezed, of.squeeze, of.gate))
        gain = (0.5 if self.residual else 1.0) * (1.55 if of.squeezed else 1.0)  # gates dampen
        self.branch.append(ConvNorm(of.wide, of.made, activation=None, gain=gain))

    def forward(self, x: Tensor) -> Tensor:
        """Run the branch, and add it to the shortcut if there is one."""
        made: Tensor = self.branch(x)
        return x + made if self.residual else made


def _stages(taken: int, rows: tuple[tuple[int, int, int, int, int], ...], activation: Activation) -> list[Inverted]:
    """Blocks of rows (expansion, kernel, first stride, made, blocks)."""
    blocks: list[Inverted] = []
    for expansion, kernel, first_stride, made, count in rows:
        for index in range(count):
            stride = 1 if index else first_stride
            blocks.append(Inverted(taken, taken * expansion, made, kernel, stride, activation=activation))
            taken = made
    return blocks


def mobilenet_v2_features() -> nn.Sequential:
    """The convolutions of MobileNet-V2 at width 1.0 (Sandler et al., CVPR 2018, table 2): stem, 17 blocks, 1280."""
    rows = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 3, 2, 32, 3), (6, 3, 2, 64, 4), (6, 3, 1, 96, 3))
    blocks = _stages(32, (*rows, (6, 3, 2, 160, 3), (6, 3, 1, 320, 1)), nn.ReLU6)
    return nn.Sequential(
        ConvNorm(3, 32, 3, 2, activation=nn.ReLU6),
        *map(InvertedResidual, blocks),
        ConvNorm(320, 1280, activation=nn.ReLU6),
    )


def mobilenet_v2() -> PooledClassifier:
    """MobileNet-V2 at width 1.0 (Sandler et al., CVPR 2018, table 2)."""
    return PooledClassifier(mobilenet_v2_features(), 1280)


def mnasnet() -> PooledClassifier:
    """MnasNet-B1, depth multiplier 1.0 (Tan et al., CVPR 2019)."""
    rows = ((1, 3, 1, 16, 1), (3, 3, 2, 24, 3), (3, 5, 2, 40, 3), (6, 5, 2, 80, 3), (6, 3, 1, 96, 2), (6, 5, 2, 192, 4))
    blocks = _stages(32, (*rows, (6, 3, 1, 320, 1)), nn.ReLU)
    features = nn.Sequential(ConvNorm(3, 32, 3, 2), *map(InvertedResidual, blocks), ConvNorm(320, 1280))
    return PooledClassifier(features, 1280)


def efficientnet_b0() -> PooledClassifier:
    """EfficientNet-B0 (Tan & Le, ICML 2019, table 1); excitations squeeze to a quarter of the block's input."""
    rows = (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
    )
    blocks = [
        Inverted(b.taken, b.wide, b.made, b.kernel, b.stride, b.taken // 4, nn.SiLU, nn.Sigmoid, nn.SiLU)
        for b in _stages(32, (*rows, (6, 3, 1, 320, 1)), nn.SiLU)
    ]
    features = nn.Sequential(
        ConvNorm(3, 32, 3, 2, activation=nn.SiLU),
        *map(InvertedResidual, blocks),
        ConvNorm(320, 1280, activation=nn.SiLU),
    )
    return PooledClassifier(features, 1280)


_V3_LARGE: tuple[tuple[int, int, int, int, int, Activation], ...] = (  # kernel, wide, made, squeezed, stride
    (3, 16, 16, 0, 1, nn.ReLU),
    (3, 64, 24, 0, 2, nn.ReLU),
    (3, 72, 24, 0, 1, nn.ReLU),
    (5, 72, 40, 24, 2, nn.ReLU),
    (5, 120, 40, 32, 1, nn.ReLU),
    (5, 120, 40, 32, 1, nn.ReLU),
    (3, 240, 80, 0, 2, nn.Hardswish),
    (3, 200, 80, 0, 1, nn.Hardswish),
    (3, 184, 80, 0, 1, nn.Hardswish),
    (3, 184, 80, 0, 1, nn.Hardswish),
    (3, 480, 112, 120, 1, nn.Hardswish),
    (3, 672, 112, 168, 1, nn.Hardswish),
    (5, 672, 160, 168, 2, nn.Hardswish),
    (5, 960, 160, 240, 1, nn.Hardswish),
    (5, 960, 160, 240, 1, nn.Hardswish),
)


def mobilenet_v3_large() -> PooledClassifier:
    """MobileNet-V3-Large at width 1.0 (Howard et al., ICCV 2019, table 1)."""
    features = nn.Sequential(ConvNorm(3, 16, 3, 2, activation=nn.Hardswish))
    taken = 16
    for kernel, wide, made, squeezed, stride, activation in _V3_LARGE:
        block = Inverted(taken, wide, made, kernel, stride, squeezed, activation, nn.Hardsigmoid)
        features.append(InvertedResidual(block))
        taken = made
    features.append(ConvNorm(taken, 960, activation=nn.Hardswish))
    return PooledClassifier(features, 960, nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, CLASSES))


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {
    "efficientnet_b0": classifier(efficientnet_b0, "EfficientNet-B0, an image classifier.", 60),
    "mnasnet": classifier(mnasnet, "MnasNet-B1, an image classifier.", 30),
    "mobilenet_v2": classifier(mobilenet_v2, "MobileNet-V2, an image classifier.", 35),
    "mobilenet_v3_large": classifier(mobilenet_v3_large, "MobileNet-V3-Large, an image classifier.", 30),
}
