"""Folder of a node: links to models, plan and log of its server. Other processes remove it after a killed agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from cotenant import linux

_PREFIX = "cotenant-node-"
_LOCK = "lock"


class NodeHome:
    """New folder with a lock for the life of this process; only the holder of the lock may remove it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        unlocked = self.path / f"{_LOCK}.new"
        self._lock = os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o600)
        linux.lock(self._lock)
        unlocked.rename(self.path / _LOCK)  # other processes never see an unlocked lock file

    def remove(self) -> None:
        """Remove the folder. Safe to repeat."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_orphans() -> None:
    """Remove the folders of ended agents of this user on this machine."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed already, of another user, or of a live agent
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                linux.lock(lock, waits=False)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
