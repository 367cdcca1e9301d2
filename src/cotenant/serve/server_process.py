"""A server as a process of its own: start `cotenant serve` or the like, hear that it is ready, stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cotenant.errors import CotenantError

START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0
_LEASH = (
    "import ctypes, os, sys\n"
    "_, parent, cores, *command = sys.argv\n"
    "ctypes.CDLL(None).prctl(1, 15)\n"  # PR_SET_PDEATHSIG: SIGTERM when the thread that started it ends
    "os.getppid() == int(parent) or sys.exit(1)\n"
    "cores and os.sched_setaffinity(0, map(int, cores.split(',')))\n"
    "os.execv(command[0], command)\n"
)
"""Runs before the server, in its process: the kernel ends it with whoever started it, however that ended."""


class StartError(CotenantError):
    """A server did not come so far as to be ready: says the last that it logged."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is ready, and what it said then: where it listens, and the states of its models."""

    process: subprocess.Popen[bytes]
    host: str
    http_port: int
    grpc_port: int
    models: Mapping[str, str]
    admin_port: int | None = None

    @property
    def http_url(self) -> str:
        """As clients name it."""
        return f"http://{self.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """As clients name it."""
        return f"{self.host}:{self.grpc_port}"


def spawn(
    *words: str,
    log: Path,
    cores: Sequence[int] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Start a command of cotenant that serves ("serve", the repository, options) on free ports; see `await_ready`.

    What it logs is added to a file. It is kept on `cores` when given; `environment` is added to that of this process.
    It ends with the thread that calls this. Raises OSError.
    """
    command = [sys.executable, "-m", "cotenant", *words, "--json", "--http-port", "0", "--grpc-port", "0"]
    leash = [sys.executable, "-I", "-c", _LEASH, str(os.getpid()), ",".join(map(str, cores))]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stderr:
        return subprocess.Popen(
            [*leash, *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            process_group=0,  # Ctrl-C in a terminal is for this process, which then stops the server
        )


def await_ready(process: subprocess.Popen[bytes], log: Path, limit_s: float = START_LIMIT_S) -> RunningServer:
    """The server of a process once it is ready.

    Raises StartError when it ends instead, or is not ready after `limit_s` seconds. It is killed then.
    """
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        with process.stdout as stdout:  # type: ignore[union-attr]  # a pipe
            line = stdout.readline().strip()
        if not line:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise StartError(f"the server did not start: {lines[-1] if lines else 'it wrote no log'}")
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        timer.cancel()
    ready = json.loads(line)
    ports = ready["http_port"], ready["grpc_port"]
    return RunningServer(
        process, ready.get("host", "127.0.0.1"), *ports, ready.get("models", {}), ready.get("admin_port")
    )


def stop_process(process: subprocess.Popen[Any], patience_s: float) -> int:
    """Ask a process to stop, and make it stop when it has not done so in time; its exit status."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def running(
    *words: str,
    log: Path,
    cores: Sequence[int] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    stop_s: float = STOP_LIMIT_S,
) -> Iterator[RunningServer]:
    """`spawn` a server, wait until it is ready, and stop it when the block ends, which it has `stop_s` seconds for.

    Its exit status is then at `process.returncode`. Raises StartError as `await_ready` does.
    """
    process = spawn(*words, log=log, cores=cores, environment=environment)
    server = await_ready(process, log)
    try:
        yield server
    finally:
        stop_process(process, stop_s)
