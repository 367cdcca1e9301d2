"""The executor that a configuration asks for."""

from __future__ import annotations

from cotenant.config import DeviceSection
from cotenant.execute.limits import Limits
from cotenant.execute.onnxruntime import OnnxRuntimeExecutor
from cotenant.execute.processes import ProcessExecutor


def make_executor(section: DeviceSection) -> OnnxRuntimeExecutor | ProcessExecutor:
    """Threads of this process, or a worker process for each tenant."""
    if section.isolation == "thread":
        return OnnxRuntimeExecutor(section.lane_nice)
    limits = Limits(
        hang_factor=section.hang_factor, hang_floor_s=section.hang_floor_s, load_limit_s=section.load_limit_s
    )
    return ProcessExecutor(section.lane_nice, limits)
