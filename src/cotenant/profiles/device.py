"""The fingerprint of the device on which a profile was measured."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from cotenant import linux
from cotenant.work import CPU

_PACKAGES = ("cotenant", "onnxruntime", "numpy", "onnx")
_OPTIONAL = ("torch",)


@dataclass(frozen=True, slots=True)
class Device:
    """Processor, cores, memory, system and library versions. Profiles with another `fingerprint` are not comparable."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    versions: dict[str, str]
    fingerprint: str

    @property
    def kind(self) -> Literal["cpu", "gpu"]:
        """ "gpu" if its `versions` have one of CUDA, else "cpu"."""
        return "gpu" if "cuda" in self.versions else "cpu"


def this_device(device: str = CPU) -> Device:
    """Describe the machine of this process, or its GPU "cuda:N"."""
    return _this_cpu() if device == CPU else _this_gpu(device)


def _this_gpu(device: str) -> Device:
    """A GPU, with its SMs as cores. Versions of torch, CUDA and cuda-bindings are part of the fingerprint."""
    import torch

    host = _this_cpu()
    facts = torch.cuda.get_device_properties(device)
    name, sms = str(facts.name), int(facts.multi_processor_count)
    versions = {**host.versions, "cuda": str(torch.version.cuda), "cuda-bindings": "none"}
    with suppress(PackageNotFoundError):
        versions["cuda-bindings"] = version("cuda-bindings")
    counted = (versions[package] for package in ("torch", "cuda", "cuda-bindings"))
    identity = "|".join((name, str(sms), str(facts.total_memory), *counted))
    digest = sha256(identity.encode()).hexdigest()[:12]
    return Device(name, sms, int(facts.total_memory), host.system, versions, digest)


def _this_cpu() -> Device:
    model, cores = linux.processor_name(), len(linux.available_cores())
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    for package in _OPTIONAL:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    identity = "|".join((model, linux.processor_flags(), str(cores), versions["onnxruntime"]))
    return Device(
        processor=model,
        cores=cores,
        memory_bytes=linux.total_memory_bytes(),
        system=f"{platform.system()} {platform.release()}",
        versions=versions,
        fingerprint=sha256(identity.encode()).hexdigest()[:12],
    )
