"""The server's trace: a disk without room, a trace before it, and other servers of the repository."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cotenant import shortages
from cotenant.core.events import DrainStarted
from cotenant.policies.registry import make_policy
from cotenant.serve.recorder import Recorder
from cotenant.shortages import Resource
from cotenant.trace import read
from cotenant.work import Machine

POLICY = make_policy("edf", {}, Machine.of({"cpu": (0,)}).devices)


def recorder(path: Path) -> Recorder:
    return Recorder(path, POLICY, Machine.of({"cpu": (0,)}))


def record(made: Recorder, *times: int) -> None:
    for time_ns in times:
        made(time_ns, DrainStarted(), [], None)


def times_of(path: Path) -> list[int]:
    return [each.time_ns for each in read(path)[1]]


class _Full:
    """A file whose n-th write or flush finds no room."""

    def __init__(self, file: Any, look: Any) -> None:
        self._file, self._look = file, look

    def write(self, data: bytes) -> int:
        self._look()
        return int(self._file.write(data))

    def flush(self) -> None:
        self._look()
        self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def on_full_disk(patch: pytest.MonkeyPatch, look: Any) -> None:
    """Have `look` called at each step that needs the disk."""
    real_open, real_replace, real_mkdir = Path.open, os.replace, Path.mkdir

    def opened(self: Path, mode: str = "r", *a: Any, **k: Any) -> Any:
        look()
        file = real_open(self, mode, *a, **k)
        return file if mode == "ab" else _Full(file, look)

    patch.setattr(Path, "open", opened)
    patch.setattr(Path, "mkdir", lambda self, *a, **k: (look(), real_mkdir(self, *a, **k)))
    patch.setattr(os, "replace", lambda a, b: (look(), real_replace(a, b)))


def test_whatever_step_finds_no_room_serving_goes_on_and_no_trace_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The n-th step that needs the disk fails, for each n; each time there were two good traces."""
    for number in itertools.count():
        path = tmp_path / str(number) / ".cotenant" / "trace.jsonl"
        for first in (1, 2):
            before = recorder(path)
            record(before, first)
            before.close()
        good = {path.read_bytes(), path.with_name("trace.jsonl.old").read_bytes()}
        steps = itertools.count()
        failed = []

        def look(number: int = number, steps: Any = steps, failed: list[int] = failed) -> None:
            if next(steps) == number:
                failed.append(number)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        caplog.clear()
        lost = shortages.counts()[Resource.DISK]
        with monkeypatch.context() as patch:
            on_full_disk(patch, look)
            made = recorder(path)
            record(made, 10)
            record(made, 20, 30)
            made.close()
        if not failed:
            assert times_of(path) == [10, 20, 30]
            break
        assert [each.levelname for each in caplog.records if each.name == "cotenant.recorder"] == ["WARNING"]
        new = [each for each in (times_of(path) if path.exists() else []) if each >= 10]
        assert shortages.counts()[Resource.DISK] - lost + len(new) >= 3
        assert not path.with_name("trace.jsonl.new").exists()
        old = path.with_name("trace.jsonl.old")
        newest = (path if path.exists() and times_of(path) else old).read_bytes()
        assert newest in good or times_of(path)[:1] == [10]
        for _ in range(3):  # runs that record nothing push nothing out
            recorder(path).close()
            assert newest in (path.read_bytes(), old.read_bytes())
    assert number > 6


def test_a_second_server_has_a_trace_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    first = recorder(path)
    record(first, 1)
    second = recorder(path)
    assert "another server writes" in caplog.text
    third = recorder(path)
    record(second, 2)
    record(third, 3)
    record(first, 4)
    second.close()
    again = recorder(path)
    record(again, 5)
    for each in (first, third, again):
        each.close()
    names = ("trace.jsonl", "trace-2.jsonl", "trace-2.jsonl.old", "trace-3.jsonl")
    assert [times_of(tmp_path / name) for name in names] == [[1, 4], [5], [2], [3]]
    assert not path.with_name("trace.jsonl.old").exists()
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        last = recorder(path)
        last.close()
    assert caplog.text == ""
    assert times_of(path.with_name("trace.jsonl.old")) == [1, 4]


def test_the_lock_ends_with_its_process_and_not_with_its_children(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    code = (
        "import sys, subprocess; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from test_recorder import recorder\n"
        "made = recorder(Path(sys.argv[1]))\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print(child.pid, flush=True); sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", code, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        second = recorder(path)
        second.close()
        other.kill()
    try:
        assert (tmp_path / "trace-2.jsonl").exists()
        recorder(path).close()
        assert not (tmp_path / "trace-2.jsonl.old").exists()
    finally:
        os.kill(child, 9)
