"""Survey of the machine: CPU, GPUs, engines and ways of sharing, with the reason why one cannot be used."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant import linux
from cotenant.execute.gpu.cuda_driver import (
    GREEN_SINCE,
    GpuError,
    attribute,
    call,
    capability_of,
    device_of,
    load_driver,
)
from cotenant.execute.gpu.sm_groups import split_groups
from cotenant.execute.gpu.sm_ladder import device_name

_SIMD = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""Processor flags by which engines choose kernels, for x86-64 and Arm."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor: this process may use `cores`, of `installed`. `caches` are bytes by level: L1d, L1i, L2, L3."""

    model: str
    cores: tuple[int, ...]
    installed: int
    caches: dict[str, int]
    simd: tuple[str, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `name` is its name in partitions, `capability` its compute capability, `sms` its number of SMs."""

    name: str
    model: str
    capability: str
    sms: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Feature:
    """An engine or a way of sharing. `detail`: what it can do, or why it cannot be used; `hint`: what would help."""

    name: str
    device: str
    usable: bool
    detail: str
    hint: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Devices:
    """All devices of the machine. `driver` and `cuda` are versions, or "". `gpu_problem`: why no GPU can be used."""

    cpu: Cpu
    gpus: tuple[Gpu, ...]
    driver: str
    cuda: str
    gpu_problem: str
    engines: tuple[Feature, ...]
    sharing: tuple[Feature, ...]


NO_GPU = "a machine with an NVIDIA GPU and its driver"


def survey(
    load: Callable[[], Any] = load_driver, find_engines: Callable[[], tuple[Feature, ...]] | None = None
) -> Devices:
    """Survey this machine; changes nothing. Imports torch and onnxruntime, which takes seconds."""
    cpu = this_cpu()
    driver: Any = None
    gpus: tuple[Gpu, ...] = ()
    problem = cuda = ""
    try:
        driver = load()
        version = int(call(driver, "cuDriverGetVersion"))
        cuda = f"{version // 1000}.{version % 1000 // 10}"
        gpus = tuple(_gpu(driver, index) for index in range(int(call(driver, "cuDeviceGetCount"))))
        if not gpus:
            problem = "the driver sees no GPU"
    except GpuError as error:
        problem = str(error) if _has_device_files() else "no NVIDIA GPU: there is no /dev/nvidia0"
    engines = (find_engines or engines_here)()
    return Devices(cpu, gpus, _driver_version(), cuda, problem, engines, _sharing(cpu, driver, gpus, problem, engines))


def this_cpu(root: Path = linux.ROOT) -> Cpu:
    """The processor of this machine; facts that the system does not report are empty."""
    words = linux.processor_flags(root).split()
    return Cpu(
        model=linux.processor_name(root),
        cores=linux.available_cores(),
        installed=os.cpu_count() or 1,
        caches={name: _bytes(size) for name, size in linux.caches(root).items()},
        simd=tuple(flag for flag in _SIMD if flag in words),
        memory_bytes=linux.total_memory_bytes(),
    )


def engines_here() -> tuple[Feature, ...]:
    """The installed engines, and whether they can use a GPU."""
    return (_onnxruntime(), *_torch())


def _onnxruntime() -> Feature:
    import onnxruntime

    version = str(onnxruntime.__version__)
    others = [name.removesuffix("ExecutionProvider") for name in onnxruntime.get_available_providers()]
    return Feature("onnxruntime", "cpu", True, f"providers: {', '.join(others)}; cotenant uses CPU", version=version)


def _torch() -> tuple[Feature, ...]:
    hint = "pip install 'cotenant[torch]'"
    try:
        import torch
    except (ImportError, OSError) as error:  # a shared library that cannot be loaded is an OSError
        why = "not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be loaded ({error})"
        return (Feature("torch", "cpu", False, why, hint), Feature("torch", "cuda", False, why, hint))
    version = str(torch.__version__)
    cpu = Feature("torch", "cpu", True, f"{torch.get_num_threads()} threads", version=version)
    if torch.version.cuda is None:
        why, hint = "built for the CPU alone", "a torch that is built for CUDA 13"
        return (cpu, Feature("torch", "cuda", False, why, hint, version))
    if not torch.cuda.is_available():
        why = f"built for CUDA {torch.version.cuda}, but sees no GPU"
        return (cpu, Feature("torch", "cuda", False, why, NO_GPU, version))
    seen = f"built for CUDA {torch.version.cuda}, sees {torch.cuda.device_count()} GPU(s)"
    return (cpu, Feature("torch", "cuda", True, seen, version=version))


def _gpu(driver: Any, index: int) -> Gpu:
    device = device_of(driver, index)
    return Gpu(
        name=device_name(index),
        model=call(driver, "cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace"),
        capability="{}.{}".format(*capability_of(driver, device)),
        sms=attribute(driver, device, "MULTIPROCESSOR_COUNT"),
        memory_bytes=int(call(driver, "cuDeviceTotalMem", device)),
    )


def _sharing(
    cpu: Cpu, driver: Any, gpus: Sequence[Gpu], problem: str, engines: Sequence[Feature]
) -> tuple[Feature, ...]:
    count = len(cpu.cores)
    text = "1 core: nothing to divide" if count == 1 else f"{count} cores, in any disjoint sets"
    found = [Feature("pinned cores", "cpu", count > 1, text, "" if count > 1 else "more cores for this process")]
    if not linux.IS_LINUX:
        found = [Feature("pinned cores", "cpu", False, "this system pins no threads to cores", "Linux")]
    if not gpus:
        hint = "pip install 'cuda-bindings>=13'" if "cuda-bindings" in problem else NO_GPU
        return (*found, *(Feature(name, "cuda", False, problem, hint) for name in ("green contexts", "streams")))
    found += [_green(driver, index, gpu) for index, gpu in enumerate(gpus)]
    torch = next((each for each in engines if each.name == "torch" and each.device == "cuda"), None)
    why = torch.detail if torch is not None else "no torch"
    if torch is not None and torch.usable:
        found.append(Feature("streams", "cuda", True, "kernels share all SMs; urgent kernels go first"))
    else:
        found.append(Feature("streams", "cuda", False, f"torch: {why}", torch.hint if torch is not None else ""))
    return tuple(found)


def _green(driver: Any, index: int, gpu: Gpu) -> Feature:
    try:
        grid, _ = split_groups(driver, device_of(driver, index))
    except GpuError as error:
        version = f"{GREEN_SINCE // 1000}.{GREEN_SINCE % 1000 // 10}"
        return Feature("green contexts", gpu.name, False, str(error), f"a driver of CUDA {version} or newer")
    text = f"{grid.groups} groups of {grid.granularity} SMs" + (f", {grid.spare} SMs left over" if grid.spare else "")
    return Feature("green contexts", gpu.name, True, text)


def _driver_version() -> str:
    version = linux.nvidia_driver()
    if version or shutil.which("nvidia-smi") is None:
        return version
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def _has_device_files() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _bytes(size: str) -> int:
    """Bytes of a size such as '48K'; 0 for any other text."""
    number, unit = size[:-1], size[-1:]
    return int(number) << {"K": 10, "M": 20, "G": 30}[unit] if number.isdecimal() and unit in "KMG" else 0
