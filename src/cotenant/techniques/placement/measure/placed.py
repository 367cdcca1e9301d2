"""Choice of the placements that a model follows: those measured to be faster than the sequential run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from cotenant.errors import CotenantError
from cotenant.execute.gpu.stream_target import StreamTarget
from cotenant.execute.protocol import LoadSpec, Run
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.strategy import VersionTrial
from cotenant.files import load, save
from cotenant.linux import available_cores
from cotenant.measure.busy import MOST_OTHERS, OthersTime
from cotenant.measure.solo import Effort, in_turns
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ProfileError
from cotenant.repository import placement_path
from cotenant.techniques.placement.execute.kept_placements import kept_placements
from cotenant.techniques.placement.execute.placeable import Placeable
from cotenant.techniques.placement.execute.placed_model import PlacedModel
from cotenant.techniques.placement.unit_placement import UnitPlacement
from cotenant.work import Share

FORMAT = "cotenant-placement-check/1"
KEPT_UP_TO = 0.97
"""Largest time of a placement, or a joint plan, over that of the run that it replaces, at which it is used
(docs/decisions/0058-plans-win-by-a-margin.md)."""
_EFFORT = Effort(budget_s=1.0, min_runs=7, max_runs=60, warm_up=1)
_Ways = Sequence[Callable[[Mapping[str, Any]], None]]
_log = logging.getLogger("cotenant.placement")


class PlacementCheck(Struct, frozen=True, forbid_unknown_fields=True):
    """Measured result of a placement: its time over that of a sequential run, at the worst shape and batch.

    `of`: digest of the placement, the device, and the shapes and batches. `others`: share of the cores' time that other
    processes used; above MOST_OTHERS, the ratio is measured again.
    """

    of: str
    ratio: float
    format: str = FORMAT
    others: float = 0.0


def follow_fast(model: Placeable, trial: VersionTrial) -> dict[int, float]:
    """Let a model follow the kept placements that gain; returns their time ratios by size of share.

    Undisturbed measurements on this device are reused. The log says which placements are not followed.
    """
    cores, graphs = available_cores(), trial.graphs
    on_gpu = {share.size: share for share in trial.shares} if isinstance(trial.target, StreamTarget) else None
    graph, most = model.graph_path.parent.name, len(cores) if on_gpu is None else 0
    ratios: dict[int, float] = {}
    good = []
    for placement in kept_placements(graphs, graph, most, on_gpu or ()):
        try:
            model.place(placement)
            share = Share(cores[: placement.cores]) if on_gpu is None else on_gpu[placement.sms]
            tasks = len(model.tasks(placement.size))
            ratio = placed_ratio(check_path(graphs, placement), model, share, trial)
        except CotenantError as error:
            _log.warning("model %s: its placement on %s is not used: %s", model.name, placement.where, error)
            continue
        figures = (model.name, ratio, placement.where, tasks)
        if ratio > KEPT_UP_TO:
            _log.warning("model %s: placement not used: %.2f of the sequential time on %s, %d tasks", *figures)
        else:
            _log.info("model %s runs by placement: %.2f of the sequential time on %s, %d tasks", *figures)
            good.append(placement)
            ratios[placement.size] = ratio
    model.place(*good)
    return ratios


def check_path(graphs: Path, placement: UnitPlacement) -> Path:
    """File of a placement's measured result."""
    return placement_path(graphs, placement.graph, placement.cores, placement.sms).with_suffix(".check.json")


def placed_ratio(path: Path, model: Placeable, share: Share, trial: VersionTrial) -> float:
    """Time of a model's placement over that of a sequential run, from the file `path`, else measured now.

    The model may have no placements afterwards.
    """
    target, batches = trial.target, (1, trial.found.config.model.max_batch)
    device = this_device(target.device).fingerprint
    facts = msgspec.json.encode((model.placed, device, [dict(each) for each in trial.shapes], batches))
    of = hashlib.sha256(facts).hexdigest()[:16]
    try:
        known = load(path, PlacementCheck, FORMAT, ProfileError, "")
        if known.of == of and known.others <= MOST_OTHERS:
            return known.ratio
    except ProfileError:  # no file, or a damaged one
        pass
    ratios = []
    ways = _on_cores(model, share) if isinstance(model, PlacedModel) else _on_streams(model, share, trial, batches)
    with OthersTime(() if isinstance(target, StreamTarget) else share.cores) as others, target.at(share), ways as runs:
        for shape in trial.shapes:
            for items in sorted(set(batches)):
                inputs = trial.inputs(shape, items)
                found = in_turns([partial(run, inputs) for run in runs], _EFFORT)
                times = [np.percentile(each.latency_ns, 25) for each in found]
                ratios.append(float(times[0] / times[1]))
    if others.is_disturbed:
        _log.warning(
            "model %s: other processes used %.0f %% of the cores while its placement was measured: the next start "
            "measures again",
            *(model.name, 100 * others.share),
        )
    save(path, PlacementCheck(of, round(max(ratios), 4), others=round(others.share, 4)))
    return max(ratios)


@contextmanager
def _on_cores(model: PlacedModel, share: Share) -> Iterator[_Ways]:
    """Two runs of the whole: by the placement, and sequential."""

    def run(way: Runner, inputs: Mapping[str, Any]) -> None:
        to_numpy(way.run(0, model.unit_count, inputs, share.cores))

    for each in (model, model.inner):
        each.prepare([(0, model.unit_count)], share.cores)
    yield partial(run, model), partial(run, model.inner)
    model.keep(())


@contextmanager
def _on_streams(model: Placeable, share: Share, trial: VersionTrial, batches: Sequence[int]) -> Iterator[_Ways]:
    """As `_on_cores`, as launches of the serving executor, which follows the placements at loading time."""
    whole = [(0, model.unit_count)]
    spec = LoadSpec(
        (share,), (0, model.unit_count), tuple(trial.shapes), max(batches), rows=tuple(sorted(set(batches)))
    )
    with trial.target.ready(model, spec) as placed:
        model.place()
        with trial.target.ready(model, spec) as sequential:
            yield tuple(partial(_launched, run, share, whole) for run in (placed, sequential))


def _launched(run: Run, share: Share, whole: Sequence[tuple[int, int]], inputs: Mapping[str, Any]) -> None:
    run(share, inputs, whole)
