"""Content-addressed cache of model files: each folder holds the files of one model, named by their digest.

A model runs from copies: files at its path may be overwritten or deleted before sessions of other cores, or another
worker, are made. A folder is removed when no process has it open and its source file is gone or was opened with other
content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from cotenant import linux
from cotenant.execute.errors import ModelError
from cotenant.files import write_whole

PATHS = "paths"
"""Sub-folder of a cache with one small file for each model file: the folder with the newest content."""
_GIB = 1 << 30
_FOLDER = re.compile(r"[0-9a-f]{32}-(ort|torch)[0-9].*")
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}-\w+")
_T = TypeVar("_T")


class HeldFolder:
    """A lock on a folder of a cache: no process removes the folder until `close`, or the end of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        descriptor = _lock(folder, is_shared=True)
        self._let_go = weakref.finalize(self, os.close, descriptor) if descriptor is not None else None

    def close(self) -> None:
        """Release the lock, and remove folders of the cache that are not used any more."""
        if self._let_go is not None:
            self._let_go()
        sweep(self.folder.parent)

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def opened(
    path: Path,
    cache_dir: Path,
    wanted: str,
    name_of: Callable[[], str],
    make: Callable[[Path, str], None],
    read: Callable[[Path], _T | None],
    role: str = "",
) -> tuple[HeldFolder, _T]:
    """Find or make the folder for the model file at `path`; returns what `read` finds there.

    `name_of` returns the folder name for the present content. `make` fills a temporary folder, which is renamed when it
    is complete. `read` returns None for a folder that is missing, incomplete or damaged. `wanted` is "", or the folder
    name that an earlier call returned; that folder is taken whatever is at `path` now. Folders of one file in another
    `role` are kept.

    Raises ModelError when the folder cannot be made, or `wanted` is gone and the file has changed.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _while_locked(cache_dir):
            found = read(cache_dir / wanted) if wanted else None
            name = wanted if found is not None else name_of()
            if wanted and name != wanted:
                raise ModelError(path, "its file has changed since it was loaded", "Load the model again")
            folder = cache_dir / name
            found = found if found is not None else read(folder)
            if found is None:
                found = _made(folder, make, read)
            if found is None:
                raise ModelError(path, f"its copy in {folder} cannot be read back", "Check the disk and try again")
            if not wanted:
                _note(path, folder, role)
            held = HeldFolder(folder)
    except OSError as error:
        reason = f"it cannot be copied into {cache_dir} ({error.strerror or error})"
        raise ModelError(path, reason, "Check the files, the permissions and the free space of both") from error
    sweep(cache_dir)
    return held, found


def copy(path: Path, files: Iterable[tuple[Path, Path]], name: str) -> None:
    """Copy a model's files, given as pairs of source and target.

    Raises ModelError when `name` (of the folder) does not begin with `digest_of` the copies: the file changed
    meanwhile. Raises OSError when a copy cannot be written.
    """
    pairs = list(files)
    for source, target in pairs:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    if not name.startswith(digest_of([target for _, target in pairs])):
        raise ModelError(path, "it was changed while it was opened", "Load it again when it has been written")


def digest_of(files: Iterable[Path]) -> str:
    """First 32 hexadecimal digits of the SHA-256 of a file, or of the digests of several files; folder names begin with
    it.

    Raises ModelError for files that are larger than the memory of the machine: they cannot be run.
    """
    files = list(files)
    held, most = sum([file.stat().st_size for file in files]), linux.total_memory_bytes()
    if held > most > 0:
        reason = f"its files have {held / _GIB:.0f} GiB, and the machine has {most / _GIB:.0f} GiB of memory"
        raise ModelError(files[0], reason, "Check that they are the right files")
    digests = [file_digest(file) for file in files]
    whole = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return whole[:32]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def processor() -> str:
    """Fingerprint of the processor: some optimised graphs depend on its vector instructions."""
    facts = linux.processor_facts()
    known = [facts.get(field, "") for field in ("model name", "flags", "Features")]
    text = "\0".join((platform.machine(), platform.processor(), *known))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def sweep(cache_dir: Path) -> None:
    """Remove folders that no process has open and that are not the newest content of a file.

    Removes nothing while a process opens a model in the cache, nor where files cannot be locked.
    """
    descriptor = _lock(cache_dir)
    if descriptor is None:
        return
    try:
        used = _newest_folders(cache_dir)
        for folder in cache_dir.iterdir():
            is_left = _UNFINISHED.fullmatch(folder.name)  # its process ended before the rename
            if is_left or (_FOLDER.fullmatch(folder.name) and folder.name not in used and _is_idle(folder)):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # owned by another user, or just removed as a whole
        pass
    finally:
        os.close(descriptor)


def _made(folder: Path, make: Callable[[Path, str], None], read: Callable[[Path], _T | None]) -> _T | None:
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name[:32]}-", dir=folder.parent))
    try:
        make(fresh, folder.name)
        if folder.exists() and read(folder) is None:
            broken = Path(tempfile.mkdtemp(prefix=f".{folder.name[:32]}-", dir=folder.parent))
            os.replace(folder, broken / "old")
            shutil.rmtree(broken, ignore_errors=True)
        try:
            os.rename(fresh, folder)
        except OSError:  # another process has made the same folder meanwhile
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return read(folder)


def _note(path: Path, folder: Path, role: str) -> None:
    """Record that this folder has the newest content of the file at `path`, for this processor."""
    whole = str(path.absolute())
    name = hashlib.sha256(f"{whole}\0{processor()}{role}".encode()).hexdigest()[:32]
    content = json.dumps({"path": whole, "folder": folder.name}).encode()
    target = folder.parent / PATHS / name
    with contextlib.suppress(OSError):  # a cache that is read only is not swept either
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, content)


def _newest_folders(cache_dir: Path) -> set[str]:
    """Folders with the newest content of files that still exist."""
    found: set[str] = set()
    if not (cache_dir / PATHS).is_dir():
        return found
    for entry in (cache_dir / PATHS).iterdir():
        try:
            newest = json.loads(entry.read_bytes())
            is_there, folder = Path(newest["path"]).exists(), str(newest["folder"])
        except (OSError, ValueError, LookupError, TypeError):  # damaged
            is_there = False
        if is_there:
            found.add(folder)
        else:
            entry.unlink(missing_ok=True)
    return found


def _is_idle(folder: Path) -> bool:
    descriptor = _lock(folder)
    if descriptor is not None:
        os.close(descriptor)  # no process can open it again: the cache is locked
    return descriptor is not None


@contextlib.contextmanager
def _while_locked(cache_dir: Path) -> Iterator[None]:
    """Hold a shared lock on the cache: no folder is removed between finding and holding it."""
    descriptor = _lock(cache_dir, is_shared=True)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(folder: Path, *, is_shared: bool = False) -> int | None:
    """A descriptor that keeps the folder locked until it is closed; None when it cannot be locked."""
    try:
        descriptor = os.open(folder, linux.open_flags("O_RDONLY", "O_DIRECTORY", "O_CLOEXEC"))
    except OSError:
        return None
    try:
        linux.lock(descriptor, is_shared=is_shared, waits=is_shared)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
