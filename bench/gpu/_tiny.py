"""Two models so small that a run over all steps takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from bench.zoo import Model

_SIDE, _CHANNELS, _WIDTH = 16, 8, 64


class _Layers(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def make_tiny(name: str) -> Model:
    """One of them, with the weights of a fixed seed. Raises KeyError for another name."""
    makers: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "tiny_convolutions": (partial(nn.Conv2d, _CHANNELS, _CHANNELS, 3, padding=1), (1, _CHANNELS, _SIDE, _SIDE)),
        "tiny_perceptron": (partial(nn.Linear, _WIDTH, _WIDTH), (1, _WIDTH)),
    }
    make, shape = makers[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = _Layers(make)
    module.eval().requires_grad_(False)
    return Model(name, module, {"x": ("float32", shape)}, ("y",), True)
