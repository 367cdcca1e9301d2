"""Modules of torch with outputs that are early, views, weights, an input, or one tensor twice."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from port_graphs import WIDTH
from torch_samples import BATCH, saved


class Ports(nn.Module):
    """Random layers over two inputs; every result may be an output as well."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = Random(seed)
        self.plan: list[tuple[str, int, int]] = []
        for _ in range(rng.randint(4, 7)):
            kind = rng.choice(("linear", "linear", "add", "tanh", "view", "part", "relu"))
            self.plan.append((kind, rng.randint(1, 3), rng.randint(1, 3)))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in self.plan])
        self.table = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.chosen = [rng.random() < 0.5 for _ in self.plan]

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        made, outputs = [a, b], {}
        for at, (kind, first, second) in enumerate(self.plan):
            x, y = made[-min(first, len(made))], made[-min(second, len(made))]
            match kind:
                case "linear":
                    x = self.layers[at](x)
                case "add":
                    x = x + y
                case "tanh":
                    x = torch.tanh(x)
                case "view":
                    outputs[f"view{at}"] = x.view(-1, 4, WIDTH // 4)
                    continue
                case "part":
                    outputs[f"part{at}"] = x[:, 3:7]
                    continue
                case _:
                    x = torch.relu(x)
            made.append(x)
            if self.chosen[at]:
                outputs[f"v{at}"] = x
        last = self.layers[-1](made[-1])
        return {**outputs, "late": last, "again": last, "same": a, "table": self.table}


def save_ports(path: Path, seed: int) -> Ports:
    """Write the archive of a module, with an open number of rows."""
    torch.manual_seed(seed)
    module = Ports(seed).eval()
    inputs = {name: torch.zeros(2, WIDTH) for name in "ab"}
    saved(module, inputs, path, {name: {0: BATCH} for name in inputs})
    return module


def torch_answer(module: nn.Module, feeds: dict[str, Any]) -> dict[str, Any]:
    """What the module itself gives, in memory of its own."""
    with torch.no_grad():
        found = module(**{name: torch.from_numpy(value.copy()) for name, value in feeds.items()})
    return {name: value.detach().clone().numpy() for name, value in found.items()}
