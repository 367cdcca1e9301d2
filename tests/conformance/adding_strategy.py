"""A run strategy in a few lines: what models of the format `null` give is more by what was chosen for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cotenant.execute.protocol import Followed
from cotenant.execute.runner import Runner
from cotenant.execute.strategy import ModelFile, RunnerWrapper, RunStrategy, VersionTrial
from cotenant.repository import ModelVersion


class More(RunnerWrapper):
    """Adds the number in the digest that it follows, if it follows one."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self.follows: dict[str, Followed] = {}

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: Any = 1, version: int = 0
    ) -> dict[str, Any]:
        outputs = super().run(start, end, tensors, threads, version)
        return {
            name: value + sum(float(each) for _, each in self.follows.get("adding", ()))
            for name, value in outputs.items()
        }


class Adding(RunStrategy):
    """Chooses 3 for every model whose file says how."""

    def open(self, file: ModelFile, inner: Callable[[], Runner]) -> Runner:
        return More(inner()) if file.path.suffix == ".null" else inner()

    def measures(self, found: ModelVersion) -> str:
        return "what is added" if found.path.suffix == ".null" else ""

    def choose(self, model: Runner, trial: VersionTrial) -> Mapping[int, float]:
        assert [trial.inputs(shape, 2)["x"].shape for shape in trial.shapes] == [(2, 4)]
        self.follow(model, trial.graphs, ((1, "3"),))
        return {1: 0.5}

    def follow(self, model: Runner, graphs: Path, chosen: Followed) -> None:
        assert isinstance(model, More)
        model.follows = {"adding": chosen}
