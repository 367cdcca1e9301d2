"""Files that are replaced as a whole, and such that only grow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folder if need be; a reader sees the old content or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(content)
    os.replace(partial, path)


def append_entry(path: Path, entry: Any) -> None:
    """Add a line of JSON to a file, which is made if need be; it is on disk when this returns.

    A line that an interruption cut short stays a line of its own. Raises OSError, ValueError when it is not JSON.
    """
    line = json.dumps(entry, allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_entries(path: Path) -> Iterator[Any]:
    """The lines of such a file, those left out that are no JSON; none when there is no file. Raises OSError."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            yield json.loads(line)
        except ValueError:
            continue  # an interruption cut it short
