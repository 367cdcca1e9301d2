"""Machine and software versions of a run, for reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from cotenant.files import processor_facts

_PACKAGES = ("cotenant", "onnxruntime", "onnx", "numpy", "grpcio", "uvloop")


def machine_facts() -> dict[str, str]:
    """Processor, cores usable by this process, memory, system and versions; unknown ones are left out."""
    facts = {"processor": processor_facts().get("model name") or platform.processor() or platform.machine()}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts["cores"] = f"{usable} of {os.cpu_count()}"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    facts["system"] = f"{platform.system()} {platform.release()}"
    facts["Python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts
