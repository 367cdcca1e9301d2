"""The profile of a model that is to be served: the stored one where it is of this model and machine."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
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
_MOST_KEPT = 256
"""Quick profiles that a server keeps: clients choose how often files change, and memory is bounded."""


def stored_or_measured(
    root: Path,
    found: ModelVersion,
    opened: OpenedModel,
    partitions: Sequence[Share],
    place: Place,
    measured: MutableMapping[str, ModelProfile] | None = None,
) -> ModelProfile:
    """The repository's profile of a model; measured quickly, with a warning, where it has none that is of use.

    A profile is of a file and its configuration: under whatever name and version they come again, they are not measured
    again. `measured` keeps what was measured quickly, by digest, for the life of a server.
    What another version of cotenant said of its rows is left out: answers depend on it.
    """
    path = profile_path(root)
    if path.exists():
        try:
            stored = load_profile(path)
        except CotenantError as error:
            _log.warning("%s", error)
        else:
            known = stored.of_digest(found.tenant, opened.digest)
            if known is not None and is_of(known, stored.device, opened) and covers(known, partitions):
                is_ours = stored.device.versions.get("cotenant") == this_device().versions["cotenant"]
                return known if is_ours else replace(known, splits=UNSET)
    made = None if measured is None else measured.get(opened.digest)
    if made is not None and covers(made, partitions):
        return made
    _log.warning(
        "model %r has no profile of this machine, or a stale one: measuring it quickly; 'cotenant profile %s' does "
        "it well",
        found.model,
        root.name,
    )
    sweep = opened.sweep(partitions, QUICK)
    made = measure_model(opened.runner, sweep, Journal(None), lambda _: None, place)
    if measured is not None:
        measured.pop(opened.digest, None)
        measured[opened.digest] = made
        if len(measured) > _MOST_KEPT:
            del measured[next(iter(measured))]
    return made
