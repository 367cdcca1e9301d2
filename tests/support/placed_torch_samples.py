"""A wide torch model, and placements of its units over a share of a GPU and two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cotenant.execute.torch.model import TorchModel
from cotenant.techniques.placement.execute.placed_torch import PlacedTorch
from cotenant.techniques.placement.unit_placement import GPU_LANE, UnitPlacement, runs_of
from cotenant.work import Share
from torch_samples import saved

SHARE = Share((0, 1, 2, 3), "cuda:0")
WIDTH = 4
BRANCHES = (2, 4, 5, 6, 13)
"""Units for the cores: three read the stem, one's result is read before and behind another that the join waits for."""


def open_placed_torch(path: Path, **given: Any) -> PlacedTorch:
    """A torch model that can be given placements."""
    return PlacedTorch(TorchModel.open(path, **given))


class Wide(nn.Module):
    """Stems of two inputs, five branches that all read one tensor, of which one has a result of its own, and a join."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.branches = nn.ModuleList([nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)]) for _ in range(5)])
        self.join = nn.Linear(5 * WIDTH, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        stem = torch.sigmoid(self.stems[0](a)) + self.stems[1](b)
        ends = []
        for first, second in self.branches:  # type: ignore[misc]
            ends.append(torch.tanh(second(torch.relu(first(stem)))))
        return {"joined": self.join(torch.cat(ends, 1)) + b.sum(1, keepdim=True), "early": ends[1] * 2}


def save_wide(path: Path) -> Path:
    """Write the archive, with the same weights every time, and an open batch dimension."""
    torch.manual_seed(1)
    batch = torch.export.Dim("batch", min=1, max=64)
    inputs = {"a": torch.zeros(2, WIDTH), "b": torch.zeros(2, WIDTH)}
    return saved(Wide().eval(), inputs, path, {key: {0: batch} for key in inputs})


def placement(model: PlacedTorch, units: list[tuple[str, str]], sms: int = SHARE.size) -> UnitPlacement:
    return UnitPlacement(model.name, model.graph_path.parent.name, 2, 0, 0, 0, runs_of(units), sms=sms)


def on_cores(model: PlacedTorch, *units: int, sms: int = SHARE.size) -> UnitPlacement:
    """In the order of the program: these units on the cores in turns, all else on the device."""
    places = {unit: f"cpu:{at % 2}" for at, unit in enumerate(units)}
    named = [(name, places.get(unit, GPU_LANE)) for unit, name in enumerate(model.dfg.unit_names)]
    return placement(model, named, sms)
