"""`cotenant` as users run it: a command, and a server in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cotenant import linux

WAIT_S = 30.0
COMMAND = (sys.executable, "-m", "cotenant")


def cotenant(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False)


def processes_of(server: int, module: str) -> list[int]:
    """The processes below a server that run a module, such as "execute.worker.main"."""
    return [pid for pid, name in linux.processes_below(server) if name == f"cotenant.{module}"]


def workers_of(server: int) -> list[int]:
    """The worker processes of a server."""
    return processes_of(server, "execute.worker.main")


class Process:
    """A server in a process of its own, ready when this returns."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self.log = root.parent / f"{root.name}.log"
        self._stderr = self.log.open("w", encoding="utf-8")
        self.popen = subprocess.Popen(
            [*COMMAND, "serve", str(root), "--json", "--http-port", "0", "--grpc-port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self.popen.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.popen.stdout.readline())
        self.url = f"http://127.0.0.1:{self.ready['http_port']}"

    def end(self, number: int) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(WAIT_S)

    @property
    def logs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]


@contextmanager
def serving(root: Path, *arguments: str) -> Iterator[Process]:
    process = Process(root, *arguments)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait(WAIT_S)
        assert process.popen.stdout is not None
        process.popen.stdout.close()
        process._stderr.close()
