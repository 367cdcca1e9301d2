"""Note file of `cotenant cluster up` for `status` and `down`: at most one cluster per user and machine."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotenant.cluster.types import Address, ClusterError
from cotenant.linux import lock, start_time


def note_path() -> Path:
    """Path of the note."""
    return Path(tempfile.gettempdir()) / f"cotenant-cluster-{os.getuid()}.json"


class Note:
    """Locked note file, held until `remove` or the end of the process.

    Raises ClusterError if another process holds it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or note_path()
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                lock(self._file, waits=False)
            except OSError:
                os.close(self._file)
                raise ClusterError(_refusal(self._path)) from None
            if self._is_mine():
                break
            os.close(self._file)  # its owner removed it meanwhile
        if os.fstat(self._file).st_uid != os.getuid():
            os.close(self._file)
            raise ClusterError(f"{self._path}: belongs to another user; remove it or set TMPDIR")
        self._write({})

    def write(self, address: Address) -> None:
        """Write the address of the gateway."""
        self._write({"host": address.host, "http_port": address.http_port})

    def remove(self) -> None:
        """Remove the note if it belongs to this process. Safe to repeat."""
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
        note = {"pid": os.getpid(), "started": start_time(os.getpid()), **more}
        content = json.dumps(note).encode()
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))


def read_note(path: Path | None = None) -> Mapping[str, Any]:
    """Read the note of this machine's cluster. Raises ClusterError if no cluster runs or it is still starting."""
    path = path or note_path()
    note = _read(path)
    if note is None:
        raise ClusterError("no cluster of this user runs on this machine; start one with 'cotenant cluster up'")
    if "http_port" not in note:
        raise ClusterError(f"the cluster of process {note['pid']} is still starting; try again when it is ready")
    return note


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        if path.stat().st_uid != os.getuid():
            raise ClusterError(f"{path}: belongs to another user; remove it or set TMPDIR")
        note: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return note if start_time(int(note["pid"])) == note["started"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refusal(path: Path) -> str:
    note = _read(path) or {}
    where = f" (process {note['pid']})" if "pid" in note else ""
    return (
        f"a cluster of this user already runs on this machine{where}: stop it with 'cotenant cluster down' first, or "
        f"set TMPDIR to another folder than {path.parent}"
    )
