"""The note that `cotenant cluster up` leaves for `status` and `down`: at most one cluster a user and machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotenant.cluster.types import Address, ClusterError


def note_path() -> Path:
    """Where the note is."""
    return Path(tempfile.gettempdir()) / f"cotenant-cluster-{os.getuid()}.json"


class Note:
    """Holds the note, by a lock on its file, from when it is made until `remove` or the end of the process.

    Raises ClusterError where another process holds it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or note_path()
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._file)
                raise ClusterError(_refusal(self._path)) from None
            if self._is_mine():
                break
            os.close(self._file)  # its owner has removed it in between
        if os.fstat(self._file).st_uid != os.getuid():
            os.close(self._file)
            raise ClusterError(f"{self._path}: belongs to another user")
        self._write({})

    def write(self, address: Address) -> None:
        """Say where the gateway listens."""
        self._write({"host": address.host, "http_port": address.http_port})

    def remove(self) -> None:
        """Remove the note, if it is still that of this process. Safe to repeat."""
        if self._file >= 0:
            if self._is_mine():
                self._path.unlink()
            os.close(self._file)
            self._file = -1

    def _is_mine(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.stat(self._path, follow_symlinks=False))
        return False

    def _write(self, more: Mapping[str, Any]) -> None:
        note = {"pid": os.getpid(), "started": started(os.getpid()), **more}
        content = json.dumps(note).encode()
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))


def read_note(path: Path | None = None) -> Mapping[str, Any]:
    """The note of the cluster that runs on this machine. Raises ClusterError when none runs, or it still starts."""
    path = path or note_path()
    note = _read(path)
    if note is None:
        raise ClusterError("no cluster was started here by you; start one with 'cotenant cluster up'")
    if "http_port" not in note:
        raise ClusterError(f"the cluster of process {note['pid']} is still starting; try again when it is ready")
    return note


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        if path.stat().st_uid != os.getuid():
            raise ClusterError(f"{path}: belongs to another user")
        note: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return note if started(int(note["pid"])) == note["started"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refusal(path: Path) -> str:
    note = _read(path) or {}
    where = f" (process {note['pid']})" if "pid" in note else ""
    return (
        f"a cluster of yours runs on this machine already{where}: end it with 'cotenant cluster down' first, or give "
        f"this one another folder for temporary files (TMPDIR) than {path.parent}"
    )


def started(pid: int) -> str:
    """When a process started, in the kernel's clock ticks: tells it from a later one of the same number.

    "" when there is none, or it has ended and only waits for its parent to notice.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]
