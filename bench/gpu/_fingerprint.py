"""What the figures were taken on: the device, its driver and clocks, and the libraries."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from cotenant.profiles.device import this_device

_CLOCKS = (
    *("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit", "temperature.gpu"),
    *("clocks_throttle_reasons.active", "mig.mode.current", "persistence_mode", "compute_mode"),
)
_PATIENCE_S = 20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A device. Figures of another `digest` (name, SMs, driver, CUDA, torch) are not comparable.

    `units` are SMs of a GPU, cores of a CPU. `clocks` are as nvidia-smi gives them, empty where it is missing.
    """

    kind: str
    name: str
    units: int
    capability: str
    memory_bytes: int
    driver: str
    cuda: str
    torch: str
    host: str
    host_cores: int
    system: str
    python: str
    clocks: dict[str, str]

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits."""
        identity = (self.kind, self.name, self.units, self.capability, self.driver, self.cuda, self.torch)
        return sha256("|".join(map(str, identity)).encode()).hexdigest()[:12]

    @property
    def folder(self) -> str:
        """Name of the folder of its figures."""
        return f"{re.sub('[^a-z0-9]+', '-', self.name.lower()).strip('-')}-{self.digest[:8]}"

    def to_json(self) -> dict[str, Any]:
        """All fields and the digest, ready for `json.dumps`."""
        return {**asdict(self), "digest": self.digest}


def read_fingerprint(kind: str, index: int) -> Fingerprint:
    """Describe "cuda" device `index`, or the processor for "cpu"."""
    import torch

    host = this_device()
    facts: dict[str, Any] = {"name": host.processor, "units": host.cores, "memory_bytes": host.memory_bytes}
    facts |= {"capability": "", "driver": "", "cuda": "", "clocks": {}}
    if kind == "cuda":
        found = torch.cuda.get_device_properties(index)
        facts = {"name": found.name, "units": found.multi_processor_count, "memory_bytes": found.total_memory}
        facts |= {"capability": f"{found.major}.{found.minor}", "cuda": str(torch.version.cuda)}
        facts |= {"driver": _smi(index, ("driver_version",)).get("driver_version", "unknown")}
        facts |= {"clocks": read_clocks(index)}
    facts |= {"host": host.processor, "host_cores": len(os.sched_getaffinity(0)), "system": host.system}
    return Fingerprint(kind=kind, torch=str(torch.__version__), python=platform.python_version(), **facts)


def read_clocks(index: int) -> dict[str, str]:
    """Clocks, power limit, temperature and modes now; empty where nvidia-smi is missing or refuses."""
    return _smi(index, _CLOCKS)


def _smi(index: int, fields: tuple[str, ...]) -> dict[str, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--id={_identity(index)}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def _identity(index: int) -> str:
    """How nvidia-smi names the device: by its UUID, since CUDA_VISIBLE_DEVICES renumbers them."""
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    return f"GPU-{uuid}" if uuid and not uuid.startswith(("GPU-", "MIG-")) else uuid or str(index)
