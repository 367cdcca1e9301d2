"""The files of loaded models, in folders of a cache that are named by what is in them.

A model runs from copies, so that it stays what it is whatever becomes of the files that it was opened from: they may be
overwritten, cut short or deleted while sessions for other cores, or another worker, have yet to be made. A folder is
removed when no process has it open and the file it came from is gone or has been opened with other content.
"""

from __future__ import annotations

import contextlib
import fcntl
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

from cotenant.execute.errors import ModelError
from cotenant.files import processor_facts, write_whole

PATHS = "paths"
"""In a cache: which folder the newest content of each file is in, one small file each."""
_GIB = 1 << 30
_FOLDER = re.compile(r"[0-9a-f]{32}-(ort|torch)[0-9].*")
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}-\w+")
_T = TypeVar("_T")


class HeldFolder:
    """A folder of a cache that nobody removes until this is closed, or its process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        descriptor = _lock(folder, fcntl.LOCK_SH)
        self._let_go = weakref.finalize(self, os.close, descriptor) if descriptor is not None else None

    def close(self) -> None:
        """Let go of it; folders of the cache that are of no more use are removed."""
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
    """Find or make the folder for the model file at `path`; gives what `read` finds in it.

    `name_of` says what folder the present content belongs in; `make` fills one of that name, which appears in one
    rename; `read` gives None for a folder that is missing, incomplete or damaged. `wanted` is "", or names the folder
    that an earlier opening gave: it is taken whatever lies at `path` by now. Folders of one file in other roles stay.

    Raises ModelError when the folder cannot be made, or is gone and the file is not the one it was.
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
    """Copy a model's files, each from the one path to the other.

    Raises ModelError when `name`, of the folder, does not begin with the digest of what was copied (see `digest_of`),
    OSError when it cannot be written.
    """
    pairs = list(files)
    for source, target in pairs:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    if not name.startswith(digest_of([target for _, target in pairs])):
        raise ModelError(path, "it was changed while it was opened", "Load it again when it has been written")


def digest_of(files: Iterable[Path]) -> str:
    """What the name of a folder begins with, by the content of a model's files: the SHA-256 of one, or of the digests
    of several, so much of it as tells them apart.

    Raises ModelError for files that are larger than the machine's memory: they cannot be run, nor are they copied.
    """
    files = list(files)
    held, most = sum([file.stat().st_size for file in files]), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if held > most:
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
    """Fingerprint of the processor, whose vector instructions some prepared forms depend on."""
    facts = processor_facts()
    told = [facts.get(field, "") for field in ("model name", "flags", "Features")]
    text = "\0".join((platform.machine(), platform.processor(), *told))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def sweep(cache_dir: Path) -> None:
    """Remove the folders that no process has open and no file has its newest content in.

    Nothing is removed while somebody opens a model there, nor where files cannot be locked.
    """
    descriptor = _lock(cache_dir, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if descriptor is None:
        return
    try:
        used = _newest_folders(cache_dir)
        for folder in cache_dir.iterdir():
            is_left = _UNFINISHED.fullmatch(folder.name)  # by a process that ended while it made one
            if is_left or (_FOLDER.fullmatch(folder.name) and folder.name not in used and _is_idle(folder)):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # it is another's to tidy, or has just been removed as a whole
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
        except OSError:  # one that another process put there meanwhile is as good
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return read(folder)


def _note(path: Path, folder: Path, role: str) -> None:
    """The newest content of the file at `path` is in this folder, on this kind of processor."""
    whole = str(path.absolute())
    name = hashlib.sha256(f"{whole}\0{processor()}{role}".encode()).hexdigest()[:32]
    content = json.dumps({"path": whole, "folder": folder.name}).encode()
    target = folder.parent / PATHS / name
    with contextlib.suppress(OSError):  # a cache that is read only is not swept either
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, content)


def _newest_folders(cache_dir: Path) -> set[str]:
    """The folders that hold the newest content of files that are still there."""
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
    descriptor = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if descriptor is not None:
        os.close(descriptor)  # nobody can take it up again: the cache is locked
    return descriptor is not None


@contextlib.contextmanager
def _while_locked(cache_dir: Path) -> Iterator[None]:
    """So that nothing is swept away between finding a folder and holding it."""
    descriptor = _lock(cache_dir, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(folder: Path, how: int) -> int | None:
    """A descriptor that keeps the folder locked until it is closed; None when that cannot be."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
