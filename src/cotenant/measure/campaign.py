"""What campaigns of measurements have in common: they may be interrupted, go on where they stopped, keep what holds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from cotenant.errors import CotenantError
from cotenant.files import append_entry, read_entries
from cotenant.profile.device import Device

OnStep = Callable[[int, int, str], None]
"""Told (steps done, steps in all, what was measured)."""
T = TypeVar("T")
K = TypeVar("K")
_log = logging.getLogger(__name__)


class Journal:
    """Finished measurements of a campaign that may be interrupted, one JSON line each. `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        for entry in read_entries(path) if path is not None else ():
            with suppress(KeyError, TypeError):  # of something else
                self._known[entry["key"]] = entry["value"]

    def values(self) -> tuple[Any, ...]:
        """All measurements, the oldest first."""
        return tuple(self._known.values())

    def put(self, key: str, value: Any) -> None:
        """Keep a measurement, which JSON can hold; it is on disk when this returns."""
        self._known[key] = value
        if self._path is not None:
            append_entry(self._path, {"key": key, "value": value})

    def remember(self, key: str, measure: Callable[[], Any]) -> Any:
        """What was measured under this key; measured and kept if it was not."""
        if self._known.get(key) is None:
            self.put(key, measure())
        return self._known[key]

    def remove(self) -> None:
        """Everything is in the file of results."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Campaign:
    """One campaign, whose results go to a file: what was measured before on this device is kept, unless `fresh`.

    `journal` stands beside the file until all is saved; `errors` tells by name why something was left out.
    """

    def __init__(self, path: Path, device: Device, *, fresh: bool) -> None:
        self.path, self.device = path, device
        self.errors: dict[str, str] = {}
        self._fresh = fresh
        unfinished = path.with_name(f"{path.stem}-{device.fingerprint}.journal")
        if fresh:
            unfinished.unlink(missing_ok=True)
        self.journal = Journal(unfinished)

    def known(self, load: Callable[[Path], T], fingerprint: Callable[[T], str], *, whole: bool = True) -> T | None:
        """What the file holds; None where nothing can be read from it, or it was measured on another device.

        A campaign that is fresh knows nothing, if it measures the `whole` of the file; else the others' part stays.
        """
        with suppress(CotenantError):
            found = None if self._fresh and whole else load(self.path)
            if found is not None and fingerprint(found) == self.device.fingerprint:
                return found
        return None


@contextmanager
def leaving_out(errors: dict[K, str], name: K) -> Iterator[None]:
    """Go on after an error inside: one member of a campaign costs no other. It is kept under a name."""
    try:
        yield
    except CotenantError as error:
        errors[name] = str(error)
    except Exception as error:  # of an engine or of ours
        _log.debug("%s was left out", name, exc_info=True)
        errors[name] = f"{type(error).__name__}: {error}"


def stamp() -> tuple[str, str]:
    """The present time and the command line, as results carry them."""
    return datetime.now(UTC).isoformat(timespec="seconds"), " ".join(["cotenant", *sys.argv[1:]])
