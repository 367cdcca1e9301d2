"""Models that were opened before: named by where their copies lie, and opened again as they were."""

from __future__ import annotations

from cotenant.errors import CotenantError
from cotenant.execute.opener import open_model
from cotenant.execute.protocol import ModelSource
from cotenant.execute.runner import Runner
from cotenant.execute.strategy import follows_of, strategies
from cotenant.repository.formats import Arithmetic
from cotenant.work import CPU


def open_source(source: ModelSource) -> Runner:
    """Open what lies in the source's folder, whatever lies at its path by now, to follow what that one followed.

    Raises ModelError when it is gone.
    """
    cache_dir = source.folder.parent
    model = open_model(
        source.path,
        cache_dir=cache_dir,
        name=source.name,
        device=source.device,
        content=source.folder.name,
        arithmetic=source.arithmetic,
    )
    try:
        for name, chosen in source.follows.items():
            strategies()[name].follow(model, cache_dir, chosen)
    except CotenantError:
        model.close()
        raise
    return model


def source_of(model: Runner) -> ModelSource:
    """Where an open model lies."""
    arithmetic = getattr(model, "arithmetic", Arithmetic())
    return ModelSource(model.path, model.graph_path.parent, model.name, CPU, arithmetic, follows_of(model))


def opened_by(model: Runner | ModelSource) -> Runner:
    """The open model: the model itself, or the one that is to be opened now. Raises ModelError."""
    return open_source(model) if isinstance(model, ModelSource) else model
