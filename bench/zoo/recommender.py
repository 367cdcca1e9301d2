"""Behaviour Sequence Transformer (Chen et al., DLP-KDD 2019, section 2): click-through of one item for one user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.zoo import Definition


@dataclass(frozen=True, slots=True)
class BstShape:
    """Sizes: `items` and `profile` are vocabularies, `history` the length of the behaviour without the target."""

    items: int = 100_000
    categories: int = 1_000
    profile: tuple[int, ...] = (50_000, 100, 10, 1_000)
    ages: int = 128
    history: int = 20
    width: int = 64
    heads: int = 8
    mlp: tuple[int, ...] = (1024, 512, 256)


BST = BstShape()


class Bst(nn.Module):
    """One transformer block over the behaviour and the target, then an MLP over everything.

    Inputs, INT64: `items` and `categories` [batch, history + 1], the target last; `ages` [batch, history + 1], the
    bucket of the time since each click (the paper's position feature; 0 for the target); `profile` [batch, fields],
    the user's and the context's categorical features. Output: probability of a click [batch, 1].
    """

    def __init__(self, shape: BstShape = BST) -> None:
        super().__init__()
        self.heads = shape.heads
        half = shape.width // 2
        self.items = nn.Embedding(shape.items, half)
        self.categories = nn.Embedding(shape.categories, half)
        self.ages = nn.Embedding(shape.ages, shape.width)
        self.profile = nn.ModuleList(nn.Embedding(rows, half) for rows in shape.profile)
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)
        self.mix = nn.Linear(shape.width, shape.width)
        self.mix_norm = nn.LayerNorm(shape.width)
        self.inner = nn.Linear(shape.width, 4 * shape.width)
        self.outer = nn.Linear(4 * shape.width, shape.width)
        self.outer_norm = nn.LayerNorm(shape.width)
        taken = ((shape.history + 1) * shape.width + len(shape.profile) * half, *shape.mlp)
        self.mlp = nn.ModuleList(nn.Linear(into, out) for into, out in zip(taken, (*shape.mlp, 1), strict=True))

    def forward(self, items: Tensor, categories: Tensor, ages: Tensor, profile: Tensor) -> Tensor:
        """Score a batch of (user, target) pairs."""

        def split(part: Tensor) -> Tensor:
            return torch.unflatten(part, 2, (self.heads, -1)).transpose(1, 2)

        x = torch.cat([self.items(items), self.categories(categories)], dim=2) + self.ages(ages)
        mixed = functional.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)))
        x = self.mix_norm(x + self.mix(mixed.transpose(1, 2).flatten(2)))
        x = self.outer_norm(x + self.outer(functional.leaky_relu(self.inner(x))))
        fields = [table(profile[:, field]) for field, table in enumerate(self.profile)]
        y = torch.cat([x.flatten(1), *fields], dim=1)
        for layer in self.mlp[:-1]:
            y = functional.leaky_relu(layer(y))
        return torch.sigmoid(self.mlp[-1](y))


def definition(shape: BstShape = BST) -> Definition:
    """Return the recommender; its ids are taken as given, so they must lie below the sizes of the tables."""
    length = shape.history + 1
    return Definition(
        Bst(shape),
        {
            "items": ("int64", (1, length)),
            "categories": ("int64", (1, length)),
            "ages": ("int64", (1, length)),
            "profile": ("int64", (1, len(shape.profile))),
        },
        ("click",),
        "Behaviour Sequence Transformer, a click predictor.",
        limits={
            "items": shape.items,
            "categories": shape.categories,
            "ages": shape.ages,
            "profile": min(shape.profile),
        },
        slo_ms=20,
    )


DEFINITIONS: Mapping[str, Callable[[], Definition]] = {"bst": definition}
