"""Small torch modules as `.pt2` files, for the tests of executors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


class ResidualCnn(nn.Module):
    """What `onnx_samples.residual_cnn` is: convolutions with residuals, branches, pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()

        def conv(inner: int, outer: int, size: int = 3) -> nn.Conv2d:
            return nn.Conv2d(inner, outer, size, padding=size // 2)

        self.first = conv(3, 16)
        self.blocks = nn.ModuleList(nn.ModuleList((conv(16, 16), conv(16, 16))) for _ in range(2))
        self.branches = nn.ModuleList((conv(16, 16, 1), conv(16, 16), conv(16, 16, 5)))
        self.last = nn.Linear(48, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for inner, outer in self.blocks:  # type: ignore[misc]
            x = torch.relu(outer(torch.relu(inner(x))) + x)
        plain, rectified, squashed = (branch(x) for branch in self.branches)
        x = torch.cat((plain, torch.relu(rectified), torch.sigmoid(squashed)), 1)
        x = nn.functional.max_pool2d(x, 2)
        y: torch.Tensor = self.last(x.mean((2, 3)))
        return y


class Picky(nn.Module):
    """Rows of a table, chosen by an index: an index outside of it raises at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(20, dtype=torch.float32).reshape(10, 2))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return torch.index_select(self.table, 0, index)  # type: ignore[arg-type]


def small_cnn() -> ResidualCnn:
    """The same weights every time."""
    module = ResidualCnn().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(1, parameter[0].numel()) ** 0.5)
    return module


def save_small(folder: Path) -> None:
    """Write `cnn.pt2` and `picky.pt2`, both with an open batch dimension."""
    batch = torch.export.Dim("batch", min=1, max=1024)
    for name, module, example in (
        ("cnn", small_cnn(), {"x": torch.zeros(2, 3, 16, 16)}),
        ("picky", Picky().eval(), {"index": torch.zeros(2, dtype=torch.int64)}),
    ):
        program = torch.export.export(module, (), example, dynamic_shapes={key: {0: batch} for key in example})
        torch.export.save(program, folder / f"{name}.pt2")
