"""The profile of a model that is to be served: the stored one where it is of this model and machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import UNSET

from cotenant.errors import CotenantError
from cotenant.execute.place import Place
from cotenant.measure.campaign import Journal
from cotenant.measure.opening import OpenedModel, covers, is_of
from cotenant.measure.solo import QUICK, measure_model
from cotenant.profile.device import this_device
from cotenant.profile.profile_file import ModelProfile, load_profile
from cotenant.repository import ModelVersion, profile_path
from cotenant.work import Share

_log = logging.getLogger("cotenant.server")


def stored_or_measured(
    root: Path, found: ModelVersion, opened: OpenedModel, partitions: Sequence[Share], place: Place
) -> ModelProfile:
    """The repository's profile of a model; measured quickly, with a warning, where it has none that is of use.

    What another version of cotenant said of its rows is left out: answers depend on it.
    """
    path = profile_path(root)
    if path.exists():
        try:
            stored = load_profile(path)
        except CotenantError as error:
            _log.warning("%s", error)
        else:
            known = stored.models.get(found.tenant)
            if known is not None and is_of(known, stored.device, opened) and covers(known, partitions):
                is_ours = stored.device.versions.get("cotenant") == this_device().versions["cotenant"]
                return known if is_ours else replace(known, splits=UNSET)
    _log.warning(
        "model %r has no profile of this machine, or a stale one: measuring it quickly; 'cotenant profile %s' does "
        "it well",
        found.model,
        root.name,
    )
    sweep = opened.sweep(partitions, QUICK)
    return measure_model(opened.runner, sweep, Journal(None), lambda _: None, place)
