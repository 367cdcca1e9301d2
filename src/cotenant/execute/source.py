"""Reopens models that were opened before, from their copies."""

from __future__ import annotations

from cotenant.errors import CotenantError
from cotenant.execute.open_model import open_model
from cotenant.execute.protocol import ModelSource
from cotenant.execute.runner import Runner
from cotenant.execute.strategy import follows_of, strategies
from cotenant.repository.formats import Arithmetic
from cotenant.work import CPU


def open_source(source: ModelSource) -> Runner:
    """Open the copy in the source's folder, whatever is at its path now, with the plans that it followed.

    Raises ModelError when the copy is gone.
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
    """The source of an open model."""
    arithmetic = getattr(model, "arithmetic", Arithmetic())
    return ModelSource(model.path, model.graph_path.parent, model.name, CPU, arithmetic, follows_of(model))


def opened_by(model: Runner | ModelSource) -> Runner:
    """The model itself if it is open, else opened from its source. Raises ModelError."""
    return open_source(model) if isinstance(model, ModelSource) else model
