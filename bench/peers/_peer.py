"""What peers have in common: an environment of their own, free ports, and the wait until all models are ready."""

from __future__ import annotations

import hashlib
import http.client
import importlib.metadata
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench._registry import BenchError
from bench._server import cache_folder

FOLDER = Path(__file__).resolve().parent
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with a peer, and onnxruntime at our own version. `package` names its requirements."""

    name: str
    package: str

    @property
    def requirements(self) -> Path:
        """The packages that are installed besides onnxruntime."""
        return FOLDER / f"requirements-{self.package}.txt"

    @property
    def folder(self) -> Path:
        """Where it is, or would be."""
        wanted = hashlib.sha256(self.requirements.read_bytes()).hexdigest()[:8]
        return cache_folder() / f"{self.package}-{wanted}-onnxruntime-{importlib.metadata.version('onnxruntime')}"

    @property
    def is_installed(self) -> bool:
        """Whether `install` has run to its end."""
        return (self.folder / "complete").exists()

    def program(self, name: str = "python") -> Path:
        """One of its programs."""
        return self.folder / "bin" / name

    def install(self) -> None:
        """Make it, unless it is there. Raises BenchError with pip's last words."""
        if self.is_installed:
            return
        runtime = f"onnxruntime=={importlib.metadata.version('onnxruntime')}"
        pip = [str(self.program()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", str(self.folder)],
            [*pip, "-r", str(self.requirements), runtime],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise BenchError(f"{self.name} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
        (self.folder / "complete").touch()

    def versions(self, *packages: str) -> dict[str, str]:
        """Of these packages of it, and of its onnxruntime."""
        code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        command = [self.program(), "-c", code, *packages, "onnxruntime"]
        *others, runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return {**dict(zip(packages, others, strict=True)), f"onnxruntime of {self.package}": runtime}


def free_ports(count: int) -> list[int]:
    """Free ports of this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_ready(name: str, process: subprocess.Popen[bytes], port: int, models: Iterable[str], log: Path) -> None:
    """Until all models of a server are ready. Raises BenchError with its log's last words when it does not start."""
    end = time.monotonic() + _START_S
    waiting = list(models)
    while waiting:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", f"/v2/models/{waiting[0]}/ready")
            if connection.getresponse().status == 200:
                waiting.pop(0)
                continue
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        if process.poll() is not None or time.monotonic() > end:
            words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise BenchError(f"{name} did not start: {' / '.join(words)}")
        time.sleep(0.1)
