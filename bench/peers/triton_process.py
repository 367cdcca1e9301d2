"""Triton Inference Server as a peer: its model repository, and a process of it.

The package `nvidia-pytriton` brings the server's binary with its Python back end. There `triton_model.py` runs the same
ONNX files on the same onnxruntime as the others. Its back end for ONNX has no package for this; it would save one copy
of each tensor between two processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import onnx

from bench.peers._peer import FOLDER, Environment, free_ports, wait_ready
from cotenant.serve.server_process import RunningServer, stop_process

ENVIRONMENT = Environment("Triton", "tritonserver")
_STOP_S = 15.0
_STUB_S = 20
_TYPES = {1: "TYPE_FP32", 2: "TYPE_UINT8", 6: "TYPE_INT32", 7: "TYPE_INT64", 9: "TYPE_BOOL", 10: "TYPE_FP16"}


class Served(NamedTuple):
    """A model with the rows as its first axis: file, largest batch, SLO, and latency of a query alone."""

    path: Path
    max_batch: int
    slo_ns: int
    service_ns: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """Triton as it comes (0), or with dynamic batches and queues that reject.

    A queue rejects requests that have waited for this part of the SLO. It also rejects those that arrive when as many
    wait as could be served one by one in that time.
    """

    patience: float = 0.0

    def __str__(self) -> str:
        if not self.patience:
            return "as it comes"
        return f"dynamic batching, queues reject after {self.patience:g} of the SLO"


TUNED = (Tuning(0.5), Tuning(0.7), Tuning(0.85))


@contextmanager
def serving(models: Mapping[str, Served], tuning: Tuning) -> Iterator[RunningServer]:
    """Serve ONNX files by model name. Raises BenchError when the server does not start."""
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT.folder), "platbase": str(ENVIRONMENT.folder)})
    )
    triton = packages / "pytriton" / "tritonserver"
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as name:
        root = Path(name)
        backend = root / "backends" / "python"
        shutil.copytree(triton / "backends" / "python", backend)
        version = sysconfig.get_python_version()
        shutil.copy2(triton / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
        for model, served in models.items():
            folder = root / "models" / model
            (folder / "1").mkdir(parents=True)
            # its interpreter looks at no environment variable
            paths = f"import sys\nsys.path[:0] = [{str(FOLDER)!r}, {str(packages)!r}]\n"
            model_py = f"{paths}from triton_model import TritonPythonModel as TritonPythonModel\n"
            (folder / "1" / "model.py").write_text(model_py, encoding="utf-8")
            (folder / "config.pbtxt").write_text(_config(model, served, tuning), encoding="utf-8")
        http, grpc = free_ports(2)
        libraries = [packages / "nvidia_pytriton.libs", triton / "lib", triton / "external_libs"]
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "LD_LIBRARY_PATH": ":".join([*map(str, libraries), str(sysconfig.get_config_var("LIBDIR"))]),
        }
        command = [
            str(triton / "bin" / "tritonserver"),
            f"--model-repository={root / 'models'}",
            f"--backend-directory={root / 'backends'}",
            f"--backend-config=python,stub-timeout-seconds={_STUB_S}",
            "--http-address=127.0.0.1",
            f"--http-port={http}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={grpc}",
            "--allow-metrics=false",
            "--exit-on-error=true",
        ]
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=root, env=variables, stdout=log, stderr=subprocess.STDOUT)
            try:
                wait_ready("Triton", process, http, models, root / "log")
                yield RunningServer(process, "127.0.0.1", http, grpc, dict.fromkeys(models, "READY"))
            finally:
                stop_process(process, _STOP_S)


def _config(name: str, served: Served, tuning: Tuning) -> str:
    graph = onnx.load(str(served.path), load_external_data=False).graph
    known = {each.name for each in graph.initializer}
    lines = [f'name: "{name}"', 'backend: "python"', f"max_batch_size: {served.max_batch}"]
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            if value.name not in known:
                tensor = value.type.tensor_type
                sizes = [axis.dim_value or -1 for axis in tensor.shape.dim[1:]]
                lines.append(f'{kind} {{ name: "{value.name}" data_type: {_TYPES[tensor.elem_type]} dims: {sizes} }}')
    lines.append("instance_group { kind: KIND_CPU count: 1 }")
    lines.append(f'parameters {{ key: "path" value {{ string_value: "{served.path}" }} }}')
    if tuning.patience:
        patience_ns = tuning.patience * served.slo_ns
        queue = (
            f"timeout_action: REJECT default_timeout_microseconds: {round(patience_ns / 1000)} "
            f"max_queue_size: {max(1, int(patience_ns / served.service_ns))}"
        )
        lines.append(f"dynamic_batching {{ default_queue_policy {{ {queue} }} }}")
    return "\n".join(lines) + "\n"
