"""A server as a child process: start `cotenant serve`, wait until it is ready, stop it."""

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
from cotenant.linux import require

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
"""Program that runs before the server in its process: the kernel ends the server with the thread that started it."""


class StartError(CotenantError):
    """A server ended before it was ready. The message has the last line of its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A ready server: its process, its addresses and the states of its models."""

    process: subprocess.Popen[bytes]
    host: str
    http_port: int
    grpc_port: int
    models: Mapping[str, str]
    admin_port: int | None = None

    @property
    def http_url(self) -> str:
        """URL of the HTTP front-end."""
        return f"http://{self.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Address of the gRPC front-end: HOST:PORT."""
        return f"{self.host}:{self.grpc_port}"


def spawn(
    *words: str,
    log: Path,
    cores: Sequence[int] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Start a serving command of cotenant ("serve", repository, options) on free ports; `await_ready` follows.

    Its log is appended to `log`. It is pinned to `cores` if given; `environment` extends that of this process. It ends
    with the calling thread. Raises OSError, and CotenantError on another system than Linux.
    """
    require(f"cotenant {words[0]}")
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
    """Wait until the server of a process is ready.

    Raises StartError and kills the process if it ends first or is not ready after `limit_s` seconds.
    """
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        with process.stdout as stdout:  # type: ignore[union-attr]  # a pipe
            line = stdout.readline().strip()
        if not line:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise StartError(f"the server did not start: {lines[-1] if lines else f'{log} is empty'}")
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
    """Send SIGTERM, then SIGKILL after `patience_s` seconds. Returns the exit status."""
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
    """Context of a running server: `spawn`, wait until it is ready, and stop it within `stop_s` seconds at the end.

    Its exit status is then at `process.returncode`. Raises StartError as `await_ready` does.
    """
    process = spawn(*words, log=log, cores=cores, environment=environment)
    server = await_ready(process, log)
    try:
        yield server
    finally:
        stop_process(process, stop_s)
