"""Placements as they lie beside the graphs of a cache, and a model that follows those it was told to."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path

from cotenant.errors import CotenantError
from cotenant.execute.concurrent.placed_model import PlacedModel, digest_of
from cotenant.execute.runner import Runner
from cotenant.profile.unit_placement import UnitPlacement, load_placement
from cotenant.repository import placement_path

_log = logging.getLogger(__name__)


def kept_placements(graphs: Path, graph: str) -> list[UnitPlacement]:
    """Those of a graph in a cache, for few cores first. A warning says which cannot be read."""
    any_cores = re.escape(placement_path(graphs, graph, 0).name).replace("0\\.json", r"(\d+)\.json")
    folder = placement_path(graphs, graph, 0).parent
    found: dict[int, UnitPlacement] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if named := re.fullmatch(any_cores, path.name):
            try:
                found[int(named[1])] = load_placement(path)
            except CotenantError as error:
                _log.warning("%s", error)
    return [found[cores] for cores in sorted(found)]
