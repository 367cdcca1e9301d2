"""Small torch modules for tests, each with one thing in it that cutting has to get right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

BATCH = Dim("batch", min=1, max=64)


class Residual(nn.Module):
    """Normalisation behind convolutions, `relu_`, `+=`, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=i > 1) for i in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(4)])
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)
        with torch.no_grad():
            for norm in self.norms:
                norm.running_mean.uniform_(-1, 1)
                norm.running_var.uniform_(0.5, 2)
                norm.weight.uniform_(0.5, 2)

    def forward(self, picture: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.relu(self.norms[0](self.convs[0](picture)))
        kept = x
        x = self.relu(self.norms[1](self.convs[1](x)))
        x = self.norms[2](self.convs[2](x))
        x += kept
        x = self.relu(x)
        x = functional.max_pool2d(x, 2) + functional.avg_pool2d(self.norms[3](self.convs[3](x)), 2)
        return {"logits": self.head(x.mean((2, 3))), "features": x}


class Encoder(nn.Module):
    """Attention over a sequence of open length, with positions made from the length."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.places = nn.Embedding(64, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 16))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = ids.shape
        x = self.words(ids) + self.places(torch.arange(length))
        for _ in range(2):  # the same weights twice
            q, k, v = (each.view(batch, length, 2, 8).transpose(1, 2) for each in self.qkv(x).split(16, dim=-1))
            a = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
            x = self.norm(x + self.out(a.transpose(1, 2).reshape(batch, length, 16)))
            x = self.norm(x + self.mlp(x))
        return x, x[:, 0]


class Recurrent(nn.Module):
    """Operators with several results: LSTM, top-k, chunk; a constant; integers out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 12)
        self.register_buffer("shift", torch.arange(3))

    def forward(self, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        x, (h, _) = self.lstm(frames)
        a, b = self.head(x).chunk(2, dim=-1)
        best, where = torch.topk((a * b.sigmoid()).mean(1), 3)
        return {"best": best, "where": where + self.shift, "state": h.transpose(0, 1)}


class Writes(nn.Module):
    """Writes into parts of tensors that are read afterwards: views of views, through an index and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        y[:, 0] = 1.0
        z = y.view(-1, 2, 4)
        z[:, 1].mul_(2.0)
        w = self.two(y)
        w[w > 0] = 0.5
        return w + y


class Sizes(nn.Module):
    """Sizes of early tensors are needed late, where no tensor has them as a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        z = torch.relu(self.one(x)).sum(1)
        z = self.two(z) * (length * 2 + 1)
        return z + self.one(y) / (y.shape[0] + length)


class Ends(nn.Module):
    """Gives an input, a weight, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.line(x)
        return [x, y, y, self.line.bias, y.view(-1)]


class Tiny(nn.Module):
    """Nothing to cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


class Chooses(nn.Module):
    """Control flow on a value, and a result with a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.line(x)
        z = torch.cond(y.sum() > 0, lambda t: t * 2, lambda t: t - 1, (y,))
        return {"z": self.line(z), "positive": y[y > 0]}


@dataclass(frozen=True)
class Sample:
    """A module, inputs by batch (or another size), and its dynamic shapes."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, torch.Tensor]]
    dynamic: Any


def _ids(size: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(size, size + 3, dtype=torch.bool)
    mask[:, -1] = False
    return {"ids": torch.randint(0, 50, (size, size + 3)), "mask": mask}


_LENGTH = Dim("length", min=2, max=60)
SAMPLES: dict[str, Sample] = {
    "residual": Sample(Residual, lambda n: {"picture": torch.randn(n, 3, 12, 12)}, {"picture": {0: BATCH}}),
    "encoder": Sample(Encoder, _ids, {"ids": {0: BATCH, 1: _LENGTH}, "mask": {0: BATCH, 1: _LENGTH}}),
    "recurrent": Sample(Recurrent, lambda n: {"frames": torch.randn(n, 7, 6)}, {"frames": {0: BATCH}}),
    "writes": Sample(Writes, lambda n: {"x": torch.randn(n, 8)}, {"x": {0: BATCH}}),
    "sizes": Sample(
        Sizes,
        lambda n: {"x": torch.randn(n, n + 2, 4), "y": torch.randn(n, 4)},
        {"x": {0: BATCH, 1: _LENGTH}, "y": {0: BATCH}},
    ),
    "ends": Sample(Ends, lambda n: {"x": torch.randn(n, 4)}, {"x": {0: BATCH}}),
    "tiny": Sample(Tiny, lambda n: {"x": torch.randn(n, 4)}, {"x": {0: BATCH}}),
    "chooses": Sample(Chooses, lambda n: {"x": torch.randn(n, 4)}, {"x": {0: BATCH}}),
}


def exported(name: str) -> tuple[nn.Module, torch.export.ExportedProgram]:
    """A sample's module with seeded weights, and its program."""
    sample = SAMPLES[name]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module = sample.make().eval()
        program = torch.export.export(module, (), sample.inputs(2), dynamic_shapes=sample.dynamic)
    return module, program


def saved(module: nn.Module, inputs: dict[str, torch.Tensor], path: Path, dynamic: Any = None) -> Path:
    """Export a module and write its archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(torch.export.export(module, (), inputs, dynamic_shapes=dynamic), path)
    return path


def answers(module: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the module itself gives, in the order of its outputs."""
    with torch.no_grad():
        found = module(**{name: value.clone() for name, value in inputs.items()})
    return list(found.values()) if isinstance(found, dict) else [found] if torch.is_tensor(found) else list(found)
