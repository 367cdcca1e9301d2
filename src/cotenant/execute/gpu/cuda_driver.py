"""The CUDA driver through its Python bindings (package cuda-bindings), imported only when they are needed.

torch for CUDA 13 depends on that package, so it is installed wherever models run on a GPU. Functions take the module of
the bindings as an argument: tests pass their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from cotenant.errors import CotenantError

GREEN_SINCE = 12040
"""Version of the first driver with green contexts (12.4), as cuDriverGetVersion returns it."""


class GpuError(CotenantError):
    """A GPU cannot be used, or its driver refused a call. The message names the call, the reason and a remedy."""


def load_driver() -> Any:
    """The initialised driver. Raises GpuError when the bindings or the driver are missing."""
    try:
        driver: Any = import_module("cuda.bindings.driver")
    except ImportError:
        raise GpuError("the package cuda-bindings is not installed; torch for CUDA 13 brings it") from None
    start(driver)
    return driver


def start(driver: Any) -> None:
    """Initialise the driver; may be repeated. Raises GpuError."""
    try:
        call(driver, "cuInit", 0)
    except GpuError:
        raise
    except Exception as error:  # the bindings load the library here, and raise their own errors
        text = "the NVIDIA driver's library cannot be loaded; is there a GPU, and its driver?"
        raise GpuError(f"{text} ({type(error).__name__})") from None


def call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call a function of the driver; returns its results but the status (None, a value, a tuple). Raises GpuError."""
    function = getattr(driver, name, None)
    if function is None:
        raise GpuError(f"the installed cuda-bindings have no {name}; expected 12.4 or newer")
    status, *values = function(*arguments)
    if int(status):
        known, text = driver.cuGetErrorString(status)
        raise GpuError(f"{name} failed: {text.decode() if not int(known) and text else status}")
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def device_of(driver: Any, index: int) -> Any:
    """The driver's handle of a GPU. Raises GpuError when there is no GPU of that number."""
    count = int(call(driver, "cuDeviceGetCount"))
    if index >= count:
        raise GpuError(f"there is no cuda:{index}; the driver sees {count} GPU{'' if count == 1 else 's'}")
    return call(driver, "cuDeviceGet", index)


def attribute(driver: Any, device: Any, name: str) -> int:
    """An attribute of a GPU by its name without the prefix CU_DEVICE_ATTRIBUTE. Raises GpuError."""
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
    """Make a context current on the calling thread, and restore the thread's context afterwards."""
    call(driver, "cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call(driver, "cuCtxPopCurrent")
