"""A model that was opened before, named by where its copies lie: what an executor loads without a look at the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cotenant.errors import CotenantError
from cotenant.execute.runner import Runner, open_model
from cotenant.repository.formats import Arithmetic
from cotenant.techniques.placement.execute.kept import follow
from cotenant.work import CPU


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The file at `path` as it was opened, with its graph in `folder` of a cache.

    `placed` are the placements to follow, by size of share and digest; see `execute.concurrent.kept.follow`.
    """

    path: Path
    folder: Path
    name: str
    device: str = CPU
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    placed: tuple[tuple[int, str], ...] = ()

    def open(self) -> Runner:
        """Open what lies in `folder`, whatever lies at `path` by now. Raises ModelError when it is gone."""
        model = open_model(
            self.path,
            cache_dir=self.folder.parent,
            name=self.name,
            device=self.device,
            content=self.folder.name,
            arithmetic=self.arithmetic,
        )
        try:
            follow(model, self.folder.parent, self.placed)
        except CotenantError:
            model.close()
            raise
        return model


def source_of(model: Runner) -> ModelSource:
    """Where an open model lies."""
    placed = tuple(getattr(model, "placed", ()))
    arithmetic = getattr(model, "arithmetic", Arithmetic())
    return ModelSource(model.path, model.graph_path.parent, model.name, CPU, arithmetic, placed)


def opened_by(model: Runner | ModelSource) -> Runner:
    """The open model: the model itself, or the one that is to be opened now. Raises ModelError."""
    return model.open() if isinstance(model, ModelSource) else model
