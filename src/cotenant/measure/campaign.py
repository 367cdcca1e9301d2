"""Common parts of measurement campaigns: they can be interrupted and resumed, and keep valid results."""

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
from cotenant.profiles.device import Device

OnStep = Callable[[int, int, str], None]
"""Called with (steps done, total steps, name of the measurement)."""
T = TypeVar("T")
K = TypeVar("K")
_log = logging.getLogger(__name__)


class Journal:
    """Finished measurements of a campaign, kept across interruptions: one JSON line each. `path` None keeps no file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, Any] = {}
        for entry in read_entries(path) if path is not None else ():
            with suppress(KeyError, TypeError):  # a line of another format
                self._known[entry["key"]] = entry["value"]

    def values(self) -> tuple[Any, ...]:
        """All measurements, the oldest first."""
        return tuple(self._known.values())

    def put(self, key: str, value: Any) -> None:
        """Keep a measurement, a JSON value; it is on disk when this returns."""
        self._known[key] = value
        if self.path is not None:
            append_entry(self.path, {"key": key, "value": value})

    def remember(self, key: str, measure: Callable[[], Any]) -> Any:
        """The measurement under this key; measured and kept if it is missing."""
        if self._known.get(key) is None:
            self.put(key, measure())
        return self._known[key]

    def remove(self) -> None:
        """Remove the journal, after the results are saved."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class Campaign:
    """One campaign with a file of results. Measurements of this device are kept, unless `fresh`.

    `journal` is a file beside the results until all are saved; `errors` has the reasons of omissions by name.
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
        """The results in the file; None if it cannot be read, or is of another device.

        With `fresh`, None if this campaign measures the `whole` file; else the results of other campaigns are kept.
        """
        with suppress(CotenantError):
            found = None if self._fresh and whole else load(self.path)
            if found is not None and fingerprint(found) == self.device.fingerprint:
                return found
        return None


@contextmanager
def leaving_out(errors: dict[K, str], name: K) -> Iterator[None]:
    """Catch an error inside, and keep it under a name: an error of one member does not stop a campaign."""
    try:
        yield
    except CotenantError as error:
        errors[name] = str(error)
    except Exception as error:  # of an engine, or a bug
        _log.debug("%s was left out", name, exc_info=True)
        errors[name] = f"{type(error).__name__}: {error}"


def stamp() -> tuple[str, str]:
    """The present time and the command line, for files of results."""
    return datetime.now(UTC).isoformat(timespec="seconds"), " ".join(["cotenant", *sys.argv[1:]])
