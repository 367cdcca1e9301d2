"""Image classifiers with seeded weights: ResNet-50 and MobileNetV2, batch normalisation folded into the convolutions.

Inference engines fold it anyway (`conv(x)*g + b` is a convolution), so these files hold plain convolutions with bias.
"""

from __future__ import annotations

import math

import numpy as np

from cotenant.zoo.graph import Array, GraphWriter

_IMAGE_SHAPE = ("batch", 3, 224, 224)
_CLASSES = 1000


class _Convolutions:
    """Convolutions of one graph, with weights from one generator in the order of the calls."""

    def __init__(self, graph: GraphWriter, rng: np.random.Generator) -> None:
        self.graph = graph
        self._rng = rng

    def _normal(self, shape: tuple[int, ...], deviation: float) -> Array:
        return self._rng.standard_normal(shape, np.float32) * np.float32(deviation)

    def conv(
        self,
        value: str,
        name: str,
        channels: tuple[int, int],
        kernel: int,
        stride: int = 1,
        *,
        groups: int = 1,
        gain: float = math.sqrt(2.0),
    ) -> str:
        """Append a convolution from channels[0] to channels[1] with weights of variance gain^2 / fan-in.

        The default gain is for a following rectifier (He et al., ICCV 2015, section 2.2).
        """
        taken, made = channels
        fan_in = taken // groups * kernel * kernel
        weight = self.graph.constant(
            f"{name}.weight", self._normal((made, taken // groups, kernel, kernel), gain / math.sqrt(fan_in))
        )
        bias = self.graph.constant(f"{name}.bias", self._normal((made,), 0.02))
        return self.graph.op(
            "Conv",
            [value, weight, bias],
            name,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
            group=groups,
        )

    def classifier(self, value: str, channels: int) -> None:
        """Append global average pooling and the fully connected layer, and declare `logits` of [batch, 1000]."""
        graph = self.graph
        pooled = graph.op("Flatten", [graph.op("GlobalAveragePool", [value], "pool")], "flatten", axis=1)
        weight = graph.constant("fc.weight", self._normal((channels, _CLASSES), 1.0 / math.sqrt(channels)))
        bias = graph.constant("fc.bias", self._normal((_CLASSES,), 0.02))
        graph.output("logits", ("batch", _CLASSES), graph.op("Gemm", [pooled, weight, bias], "fc"))


def resnet50(rng: np.random.Generator) -> GraphWriter:
    """ResNet-50 with the stride in the 3x3 convolutions, as the frameworks build it (He et al., CVPR 2016, table 1).

    Input `input`: FP32 [batch, 3, 224, 224]. Output `logits`: FP32 [batch, 1000].
    """
    graph = GraphWriter("resnet50")
    net = _Convolutions(graph, rng)
    value = net.conv(graph.input("input", np.float32, _IMAGE_SHAPE), "stem", (3, 64), 7, 2)
    value = graph.op("Relu", [value], "stem/relu")
    value = graph.op("MaxPool", [value], "stem/pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            name = f"stage{stage}/block{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            branch = graph.op("Relu", [net.conv(value, f"{name}/conv1", (channels, width), 1)], f"{name}/relu1")
            branch = graph.op("Relu", [net.conv(branch, f"{name}/conv2", (width, width), 3, stride)], f"{name}/relu2")
            # A branch adds a quarter of the shortcut's variance, so that sixteen of them do not blow the signal up.
            branch = net.conv(branch, f"{name}/conv3", (width, 4 * width), 1, gain=0.5)
            if block == 0:
                value = net.conv(value, f"{name}/shortcut", (channels, 4 * width), 1, stride, gain=1.0)
                channels = 4 * width
            value = graph.op("Relu", [graph.op("Add", [branch, value], f"{name}/add")], f"{name}/relu3")
    net.classifier(value, channels)
    return graph


def mobilenet_v2(rng: np.random.Generator) -> GraphWriter:
    """MobileNetV2 of width 1.0 (Sandler et al., CVPR 2018, table 2).

    Input `input`: FP32 [batch, 3, 224, 224]. Output `logits`: FP32 [batch, 1000].
    """
    graph = GraphWriter("mobilenet_v2")
    net = _Convolutions(graph, rng)

    def relu6(value: str) -> str:
        return graph.op("Clip", [value, graph.scalar(0.0), graph.scalar(6.0)], f"{value}/relu6")

    value = relu6(net.conv(graph.input("input", np.float32, _IMAGE_SHAPE), "stem", (3, 32), 3, 2))
    channels = 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for stage, (expansion, made, blocks, first_stride) in enumerate(stages, start=1):
        for block in range(blocks):
            name = f"stage{stage}/block{block}"
            stride = first_stride if block == 0 else 1
            wide = channels * expansion
            branch = value
            if expansion > 1:
                branch = relu6(net.conv(branch, f"{name}/expand", (channels, wide), 1))
            branch = relu6(net.conv(branch, f"{name}/depthwise", (wide, wide), 3, stride, groups=wide))
            residual = stride == 1 and channels == made
            branch = net.conv(branch, f"{name}/project", (wide, made), 1, gain=0.5 if residual else 1.2)
            value = graph.op("Add", [branch, value], f"{name}/add") if residual else branch
            channels = made
    net.classifier(relu6(net.conv(value, "head", (channels, 1280), 1)), 1280)
    return graph
