"""Three image classifiers of different families as one graph: the same picture in, the mean of their answers out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bench.zoo import Definition, densenet, inception, resnet

MEMBERS: Mapping[str, Callable[[], Definition]] = {
    "resnet50": resnet.DEFINITIONS["resnet50"],
    "densenet121": densenet.DEFINITIONS["densenet121"],
    "googlenet": inception.DEFINITIONS["googlenet"],
}
"""ResNet-50 does about as much as the other two together."""


class Ensemble(nn.Module):
    """Picture [batch, 3, 224, 224] -> `scores` [batch, 1000], which add up to 1."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the model's input
        """Ask every member; none waits for another."""
        return torch.stack([member(input).softmax(1) for member in self.members]).mean(0)


def definition(members: Mapping[str, Callable[[], Definition]] = MEMBERS) -> Definition:
    """Return the ensemble of classifiers that all take one picture `input`."""
    made = {name: make() for name, make in members.items()}
    return Definition(
        Ensemble([one.module for one in made.values()]),
        next(iter(made.values())).inputs,
        ("scores",),
        f"An ensemble of {', '.join(made)}, an image classifier.",
        slo_ms=650,
    )


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {"ensemble": definition}
