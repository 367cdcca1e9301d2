"""The CUDA driver through its Python bindings (package cuda-bindings), which nothing here needs until it is asked for.

torch built for CUDA 13 depends on that package, so who can run a model on a GPU has it. The module of the bindings is
handed around as a value: tests hand over one of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from cotenant.errors import CotenantError

GREEN_SINCE = 12040
"""CUDA version of the first driver with green contexts (12.4), as cuDriverGetVersion counts."""


class GpuError(CotenantError):
    """A GPU cannot be used, or its driver refused a call: names the call, the reason and what would mend it."""


def load_driver() -> Any:
    """The driver, initialised. Raises GpuError when the bindings or the driver itself are missing."""
    try:
        driver: Any = import_module("cuda.bindings.driver")
    except ImportError:
        raise GpuError("the package cuda-bindings is not installed; torch for CUDA 13 brings it") from None
    start(driver)
    return driver


def start(driver: Any) -> None:
    """Initialise the driver; again is harmless. Raises GpuError."""
    try:
        call(driver, "cuInit", 0)
    except GpuError:
        raise
    except Exception as error:  # the bindings load the library here, and have errors of their own for it
        text = "the NVIDIA driver's library cannot be loaded; is there a GPU, and its driver?"
        raise GpuError(f"{text} ({type(error).__name__})") from None


def call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call a function of the driver: what it gives beside the status (None, one value, or a tuple). Raises GpuError."""
    function = getattr(driver, name, None)
    if function is None:
        raise GpuError(f"the installed cuda-bindings have no {name}; expected 12.4 or newer")
    status, *values = function(*arguments)
    if int(status):
        known, text = driver.cuGetErrorString(status)
        raise GpuError(f"{name} failed: {text.decode() if not int(known) and text else status}")
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def device_of(driver: Any, index: int) -> Any:
    """The driver's handle of a GPU. Raises GpuError when there is none of that number."""
    count = int(call(driver, "cuDeviceGetCount"))
    if index >= count:
        raise GpuError(f"there is no cuda:{index}; the driver sees {count} GPU{'' if count == 1 else 's'}")
    return call(driver, "cuDeviceGet", index)


def attribute(driver: Any, device: Any, name: str) -> int:
    """A number that the driver has about a GPU, by the name of the attribute without its prefix. Raises GpuError."""
    wanted = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call(driver, "cuDeviceGetAttribute", wanted, device))


def capability_of(driver: Any, device: Any) -> tuple[int, int]:
    """Compute capability of a GPU, such as (9, 0). Raises GpuError."""
    return (
        attribute(driver, device, "COMPUTE_CAPABILITY_MAJOR"),
        attribute(driver, device, "COMPUTE_CAPABILITY_MINOR"),
    )


@contextmanager
def current(driver: Any, context: Any) -> Iterator[None]:
    """Make a context that of the calling thread for a while; leaves the thread as it was."""
    call(driver, "cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call(driver, "cuCtxPopCurrent")
