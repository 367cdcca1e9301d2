"""MLServer as a peer: its environment, its model repository, and a process of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench._registry import BenchError
from bench._server import cache_folder
from cotenant.serve.server_process import stop_process

FOLDER = Path(__file__).resolve().parent
REQUIREMENTS = FOLDER / "requirements-mlserver.txt"
MODEL_PREFIX = "binary/"
"""Before a model's name, it leads to the binary handler of our runtime (mlserver_runtime.py)."""
_START_S = 60.0
_STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """How MLServer divides the work: its processes beside the front-end (0: none), and calls at once in each."""

    workers: int
    threads: int

    def __str__(self) -> str:
        return f"parallel_workers={self.workers}, {self.threads} thread{'s' if self.threads > 1 else ''} each"


def tunings(cores: int) -> tuple[Tuning, ...]:
    """All in the front-end's process, one worker for all cores, a worker a core."""
    return (Tuning(0, cores), Tuning(1, cores), Tuning(cores, 1))


def environment() -> Path:
    """Where MLServer's own virtual environment is, or would be."""
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:8]
    return cache_folder() / f"mlserver-{wanted}-onnxruntime-{importlib.metadata.version('onnxruntime')}"


def is_installed() -> bool:
    """Whether `install` has run to its end."""
    return (environment() / "bin" / "mlserver").exists()


def install() -> None:
    """Make the environment, unless it is there. Raises BenchError with pip's last words."""
    if is_installed():
        return
    folder = environment()
    runtime = f"onnxruntime=={importlib.metadata.version('onnxruntime')}"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, "-r", str(REQUIREMENTS), runtime]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchError(f"MLServer cannot be installed: {done.stderr.strip().splitlines()[-1:]}")


def packages() -> dict[str, str]:
    """Versions that matter, as installed in its environment."""
    code = "import importlib.metadata as m; print(m.version('mlserver'), m.version('onnxruntime'))"
    output = subprocess.run([environment() / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    mlserver, runtime = output.stdout.split()
    return {"mlserver": mlserver, "mlserver's onnxruntime": runtime}


@contextmanager
def serving(models: Mapping[str, Path], tuning: Tuning) -> Iterator[str]:
    """Serve ONNX files by model name; give the URL of the HTTP front-end. Raises BenchError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as name:
        root = Path(name)
        port = _configure(root, models, tuning)
        variables = {**os.environ, "PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"}
        command = [str(environment() / "bin" / "mlserver"), "start", str(root)]
        with (root / "log").open("w+", encoding="utf-8") as log:
            process = subprocess.Popen(command, cwd=root, env=variables, stdout=log, stderr=subprocess.STDOUT)
            try:
                _wait_ready(process, port, models, log.name)
                yield f"http://127.0.0.1:{port}"
            finally:
                stop_process(process, _STOP_S)


def _configure(root: Path, models: Mapping[str, Path], tuning: Tuning) -> int:
    ports = _free_ports(3)
    settings = {
        "debug": False,
        "host": "127.0.0.1",
        **dict(zip(("http_port", "grpc_port", "metrics_port"), ports, strict=True)),
        "parallel_workers": tuning.workers,
        "gzip_enabled": False,
        "environments_dir": str(root / "envs"),
        "metrics_dir": str(root / "metrics"),
    }
    (root / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    (root / "metrics").mkdir()
    for name, path in models.items():
        (root / name).mkdir()
        model = {
            "name": name,
            "implementation": "mlserver_runtime.OnnxRuntime",
            "parameters": {"uri": str(path), "threads": tuning.threads},
        }  # adaptive batching is off unless asked for
        (root / name / "model-settings.json").write_text(json.dumps(model), encoding="utf-8")
    return ports[0]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_ready(process: subprocess.Popen[bytes], port: int, models: Mapping[str, Path], log: str) -> None:
    import http.client

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
            words = Path(log).read_text(encoding="utf-8").strip().splitlines()[-3:]
            raise BenchError(f"MLServer did not start: {' / '.join(words)}")
        time.sleep(0.1)
