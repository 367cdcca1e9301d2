"""Machine and software versions of a run, for reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from cotenant import linux

_PACKAGES = ("cotenant", "onnxruntime", "onnx", "numpy", "grpcio", "uvloop")


def machine_facts() -> dict[str, str]:
    """Processor, cores usable by this process, memory, system and versions; unknown ones are left out."""
    facts = {"processor": linux.processor_name()}
    facts["cores"] = f"{len(linux.available_cores())} of {os.cpu_count()}"
    if memory := linux.total_memory_bytes():
        facts["memory"] = f"{memory / 2**30:.1f} GiB"
    facts["system"] = f"{platform.system()} {platform.release()}"
    facts["Python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts
