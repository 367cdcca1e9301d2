"""Profiles that were measured quickly while models were loaded, kept for the next start of a server."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from msgspec import UNSET

from cotenant.errors import CotenantError
from cotenant.measure.campaign import stamp
from cotenant.measure.opened_model import remember_verdict
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Profile, load_profile, save_profile

_log = logging.getLogger("cotenant.server")
_MOST = 256
"""Profiles that are kept: clients choose how often files change, and memory is bounded."""


class QuickProfiles:
    """Quick profiles by digest, the oldest first, in memory and in a file; thread-safe.

    A file that was written on another processor or by other versions of the libraries is not used. `path` None keeps
    nothing on disk.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, ModelProfile] = {}
        if path is not None and path.exists():
            self._read(path)

    @property
    def known(self) -> tuple[ModelProfile, ...]:
        """All of them, for `VersionSpec.known`."""
        return tuple(self._known.values())

    def add(self, profile: ModelProfile) -> None:
        """Keep a profile. One with a disturbed latency is kept in memory alone."""
        with self._lock:
            had = self._known.pop(profile.digest, None)
            self._known[profile.digest] = profile
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
            if had != profile and self._path is not None and _is_calm(profile):
                self._write(self._path)

    def _read(self, path: Path) -> None:
        try:
            stored = load_profile(path)
        except CotenantError as error:
            _log.warning("%s", error)
            return
        here = this_device()
        if (stored.device.processor, stored.device.versions) != (here.processor, here.versions):
            return
        self._known = {each.digest: each for each in stored.models.values()}
        for each in self._known.values():
            if each.merging is not UNSET:
                remember_verdict(each.digest, each.merging)

    def _write(self, path: Path) -> None:
        calm = {digest: each for digest, each in self._known.items() if _is_calm(each)}
        try:
            save_profile(path, Profile(this_device(), *stamp(), calm))
        except (OSError, CotenantError) as error:
            _log.warning("quick profiles are not kept for the next start: %s", error)


def _is_calm(profile: ModelProfile) -> bool:
    """Whether no latency is disturbed. Latencies on one core have no time of other processes (`solo.in_turns`)."""
    return not any(point.is_disturbed and point.cores > 1 for point in profile.points)
