"""Two models so small that a run over all steps takes seconds."""

from __future__ import annotations

import torch
from torch import nn

from cotenant.zoo.torch import Model

_SIDE, _CHANNELS, _WIDTH = 16, 8, 64


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def make_tiny(name: str) -> Model:
    """One of them, with the weights of a fixed seed. Raises KeyError for another name."""
    cls, shape = {
        "tiny_convolutions": (_Convolutions, (1, _CHANNELS, _SIDE, _SIDE)),
        "tiny_perceptron": (_Perceptron, (1, _WIDTH)),
    }[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = cls()
    module.eval().requires_grad_(False)
    return Model(name, module, {"x": ("float32", shape)}, ("y",), True)
