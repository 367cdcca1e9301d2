"""Results of loads, kept in files for the next engine: models with unchanged files are not opened and tried again.

A file counts as unchanged while its size, inode, mtime and ctime are. The time of such a check does not depend on the
size of the model. See docs/decisions/0076-workers-outlive-the-engine.md.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from cotenant.execute.strategy import strategies
from cotenant.files import write_whole
from cotenant.measure.load_spec import LoadReport, VersionSpec, decode, encode
from cotenant.profiles.device import this_device
from cotenant.repository import profile_path

_SETTLED_NS = 2_000_000_000
"""Files that changed so shortly before a load may change again within one tick of the file system's clock."""
Stamps = tuple[tuple[str, int, int, int, int], ...]
"""Of each file: path, size, inode, mtime and ctime in ns. Size -1: there is no file."""


class StoredLoad(Struct, frozen=True):
    """The result of a load. `key` is a digest of what it depends on beside files."""

    key: str
    files: Stamps
    report: LoadReport


class StoredLoads:
    """Results of loads of the engines of one server, one file a tenant in `folder`. Each is used once. Thread-safe.

    Loads with an assumed profile, loads that run strategies measure, and loads for a GPU are not kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._versions = this_device().versions
        self._used: set[str] = set()

    def find(self, spec: VersionSpec) -> LoadReport | None:
        """The result of an earlier engine's load of a version; None where anything that it depends on has changed."""
        tenant = spec.found.tenant
        if tenant in self._used:
            return None
        self._used.add(tenant)
        try:
            stored: StoredLoad = decode(self._path(tenant).read_bytes(), StoredLoad)
        except (OSError, msgspec.MsgspecError):
            return None
        is_same = stored.files == stamps_of(spec) and stored.key == self._key(spec)
        return stored.report if is_same else None

    def keep(self, spec: VersionSpec, files: Stamps, report: LoadReport) -> None:
        """Keep the result of a load. `files` are from before it began."""
        self._used.add(spec.found.tenant)
        settled_ns = time.time_ns() - _SETTLED_NS
        is_plain = spec.device is None and not any(each.measures(spec.found) for each in strategies().values())
        is_settled = bool(files) and all(max(stamp[3:]) <= settled_ns for stamp in files)
        path = self._path(spec.found.tenant)
        with suppress(OSError):  # the next engine loads it as this one did
            if report.warning or not is_plain or not is_settled:
                path.unlink(missing_ok=True)
            else:
                write_whole(path, encode(StoredLoad(self._key(spec), files, report)))

    def _path(self, tenant: str) -> Path:
        return self._folder / hashlib.sha256(tenant.encode()).hexdigest()[:32]

    def _key(self, spec: VersionSpec) -> str:
        """A digest of what a load depends on beside files: the configuration, the lanes and installed packages."""
        plain = msgspec.structs.replace(spec, known=(), verdicts={})
        return hashlib.sha256(encode((plain, sorted(self._versions.items())))).hexdigest()


def stamps_of(spec: VersionSpec) -> Stamps:
    """The files that a load of a version depends on, as they are now. None where links lead to other folders."""
    paths = {str(path) for path in _files(spec)}
    if any(os.path.islink(path) and os.path.isdir(path) for path in paths):
        return ()
    return tuple(_stamp(path) for path in sorted(paths))


def _files(spec: VersionSpec) -> Iterator[Path]:
    """Files, and folders in the folder of the version."""
    found = spec.found
    folder = found.path.parent.parent
    yield profile_path(Path(spec.root))
    yield found.path
    for section in found.config.samples.values():
        if section.file is not None:
            yield folder / section.file
    for at, folders, names in os.walk(found.path.parent):
        yield from (Path(at) / name for name in (*folders, *names))


def _stamp(path: str) -> tuple[str, int, int, int, int]:
    try:
        facts = os.stat(path)
    except OSError:
        return path, -1, 0, 0, 0
    return path, facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns
