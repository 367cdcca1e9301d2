"""Networks of latencies of groups that are made here, in the form of those that the authors of Abacus released."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench._data import DATA
from bench._weights import MIG4G, PAIRS, TRIPLES
from cotenant.core.predictor import Group, Member
from cotenant.work import Work


def sums(path: Path, size: int, known: int = 7, outputs: int = 1) -> Path:
    """A network that adds up all inputs and `size` times 1000: which one was asked can be read off its answers."""
    return _keep(path, np.ones(known + 4 * size), 1000.0 * size, outputs)


def units(path: Path, size: int, unit_ms: float, fixed_ms: float = 0.0, known: int = 7) -> Path:
    """A network by which a group takes so many ms a unit of every member, and so many besides, whatever the rows."""
    weights = np.zeros(known + 4 * size)
    weights[known::4], weights[known + 1 :: 4] = -unit_ms, unit_ms
    return _keep(path, weights, fixed_ms, 1)


def folder(path: Path) -> Path:
    """A data folder with the tables of the repository, and sums by the names of released networks of the device."""
    for table in ("models.csv", "qos_targets.csv"):
        copy = path / "abacus" / table
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((DATA / "abacus" / table).read_text(encoding="utf-8"), encoding="utf-8")
    for name, size in ((PAIRS, 2), (TRIPLES, 3), (MIG4G, 4)):
        sums(path / "abacus" / name, size)
    return path


def group(*models: str, end: int = 1, items: int = 4) -> Group:
    """The first units of these models."""
    return tuple(Member(Work(name, 0, items, 0, end), 1) for name in models)


def _keep(path: Path, weights: np.ndarray, fixed: float, outputs: int) -> Path:
    layers = {"W1": np.array([weights, weights]), "b1": np.zeros(2)}
    layers |= {f"{kind}{n}": value for n in (2, 3) for kind, value in (("W", np.eye(2)), ("b", np.zeros(2)))}
    layers |= {"W4": np.full((outputs, 2), 0.5), "b4": np.full(outputs, fixed)}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **layers)  # type: ignore[arg-type]
    return path
