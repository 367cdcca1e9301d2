"""Which of its placements a model follows: those that were measured to be at least as fast as what they replace."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from cotenant.errors import CotenantError
from cotenant.execute.concurrent.kept import kept_placements
from cotenant.execute.concurrent.placed_model import PlacedModel
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.place import CorePlace
from cotenant.execute.runner import to_numpy
from cotenant.files import load, save
from cotenant.measure.inputs import DeclaredShape, make_inputs
from cotenant.measure.solo import Effort, in_turns
from cotenant.profile.device import this_device
from cotenant.profile.profile_file import ProfileError
from cotenant.profile.unit_placement import UnitPlacement
from cotenant.repository import placement_path
from cotenant.work import Share

FORMAT = "cotenant-placement-check/1"
NO_SLOWER = 1.0
"""Of the time of a sequential run: a placement that takes longer than this part of it is left aside."""
_EFFORT = Effort(budget_s=1.0, min_runs=7, max_runs=60, warm_up=1)
_log = logging.getLogger("cotenant.placement")


class PlacementCheck(Struct, frozen=True, forbid_unknown_fields=True):
    """What a placement came to: its time over that of a sequential run in the same share, at the worst shape and batch.

    `of` is a digest of the placement, the device, and the shapes and batches.
    """

    of: str
    ratio: float
    format: str = FORMAT


def follow_fast(
    model: PlacedModel, graphs: Path, shapes: Sequence[DeclaredShape], max_batch: int, effort: Effort = _EFFORT
) -> dict[int, float]:
    """Let a model follow the kept placements that are no slower; gives what they came to, by number of cores.

    What was measured once on this device is not measured again. What is left aside is told to the log.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    ratios: dict[int, float] = {}
    good = []
    for placement in kept_placements(graphs, model.graph_path.parent.name, len(cores)):
        try:
            model.place(placement)
            share = Share(cores[: placement.cores])
            path = check_path(graphs, placement)
            ratio = placed_ratio(path, model, share, shapes, (1, max_batch), effort)
        except CotenantError as error:
            _log.warning("model %s: its placement on %d cores is left aside: %s", model.name, placement.cores, error)
            continue
        told = (model.name, ratio, placement.cores, len(model.pieces(placement.cores)))
        if ratio > NO_SLOWER:
            _log.warning(
                "model %s: left aside: takes %.2f of the time of a sequential run on %d cores, %d pieces", *told
            )
        else:
            _log.info("model %s runs by placement: %.2f of the time of a sequential run on %d cores, %d pieces", *told)
            good.append(placement)
            ratios[placement.cores] = ratio
    model.place(*good)
    return ratios


def check_path(graphs: Path, placement: UnitPlacement) -> Path:
    """Where it is kept what a placement came to."""
    return placement_path(graphs, placement.graph, placement.cores).with_suffix(".check.json")


def placed_ratio(
    path: Path,
    model: PlacedModel,
    share: Share,
    shapes: Sequence[DeclaredShape],
    batches: Sequence[int],
    effort: Effort = _EFFORT,
) -> float:
    """What a model's placement takes of the time of a sequential run, as it was measured before, else measured now.

    `path` is where that is kept.
    """
    facts = msgspec.json.encode((model.placed, this_device().fingerprint, [dict(each) for each in shapes], batches))
    of = hashlib.sha256(facts).hexdigest()[:16]
    try:
        known = load(path, PlacementCheck, FORMAT, ProfileError, "")
        if known.of == of:
            return known.ratio
    except ProfileError:  # none yet, or a damaged one
        pass
    whole, cores = [(0, model.unit_count)], share.cores
    ratios = []
    with CorePlace().at(share):
        model.prepare(whole, cores)
        SegmentedModel.prepare(model, whole, cores)
        for shape in shapes:
            for items in sorted(set(batches)):
                inputs = make_inputs(model.inputs, shape, items, max(batches) > 1)
                placed, sequential = (
                    partial(_run, way, model, inputs, cores) for way in (PlacedModel.run, SegmentedModel.run)
                )
                times = [np.percentile(each, 25) for each in in_turns((placed, sequential), effort)]
                ratios.append(float(times[0] / times[1]))
    model.keep(())
    save(path, PlacementCheck(of, round(max(ratios), 4)))
    return max(ratios)


def _run(way: Any, model: PlacedModel, inputs: Mapping[str, Any], cores: tuple[int, ...]) -> None:
    to_numpy(way(model, 0, model.unit_count, inputs, cores))
