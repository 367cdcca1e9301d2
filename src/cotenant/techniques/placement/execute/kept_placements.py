"""Placements kept beside the graphs of a cache, and models that follow chosen ones."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from cotenant.errors import CotenantError
from cotenant.execute.runner import Runner
from cotenant.repository import placement_path
from cotenant.techniques.placement.execute.placeable import Placeable, digest_of
from cotenant.techniques.placement.unit_placement import UnitPlacement, load_placement

_log = logging.getLogger(__name__)


def kept_placements(graphs: Path, graph: str, most_cores: int, sms: Iterable[int] = ()) -> list[UnitPlacement]:
    """Kept placements of a graph, for up to `most_cores` cores, or for shares of a GPU with these numbers of SMs.

    Logs a warning for each that cannot be read.
    """
    found = []
    on_cores = [placement_path(graphs, graph, cores) for cores in range(2, most_cores + 1)]
    for path in [*on_cores, *(placement_path(graphs, graph, 0, size) for size in sms)]:
        try:
            found += [load_placement(path)] if path.exists() else []
        except CotenantError as error:
            _log.warning("%s", error)
    return found


def follow(model: Runner, graphs: Path, wanted: Collection[tuple[int, str]]) -> None:
    """Let a model follow these placements (size of share and digest). If one has changed, it follows none and logs a
    warning."""
    if not wanted or not isinstance(model, Placeable):
        return
    graph, sizes = model.graph_path.parent.name, [size for size, _ in wanted]
    kept = kept_placements(graphs, graph, max(sizes), sizes)
    found = [each for each in kept if (each.size, digest_of(each)) in wanted]
    if len(found) < len(wanted):
        _log.warning("model %s: its placement changed after loading: it runs sequentially", model.name)
        return
    model.place(*found)
