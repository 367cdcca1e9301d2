"""MLServer as a peer: its model repository, and a process of it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers._peer import FOLDER, Environment, free_ports, wait_ready
from cotenant.serve.server_process import stop_process

ENVIRONMENT = Environment("MLServer", "mlserver")
MODEL_PREFIX = "binary/"
"""Before a model's name, it leads to the binary handler of our runtime (mlserver_runtime.py)."""
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


@contextmanager
def serving(models: Mapping[str, Path], tuning: Tuning) -> Iterator[str]:
    """Serve ONNX files by model name; give the URL of the HTTP front-end. Raises BenchError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as name:
        root = Path(name)
        port = _configure(root, models, tuning)
        variables = {**os.environ, "PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"}
        command = [str(ENVIRONMENT.program("mlserver")), "start", str(root)]
        with (root / "log").open("w+", encoding="utf-8") as log:
            process = subprocess.Popen(command, cwd=root, env=variables, stdout=log, stderr=subprocess.STDOUT)
            try:
                wait_ready("MLServer", process, port, models, Path(log.name))
                yield f"http://127.0.0.1:{port}"
            finally:
                stop_process(process, _STOP_S)


def _configure(root: Path, models: Mapping[str, Path], tuning: Tuning) -> int:
    ports = free_ports(3)
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
