"""Makes this Linux look like macOS ("darwin") or Windows ("win32"): what those lack is hidden or fails.

Run as `python other_system.py SYSTEM FILE.py ARGUMENTS...`, or call `hide` before the first import of cotenant.
Libraries of others are loaded before, since they find the files of this system.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import importlib
import io
import mmap
import os
import platform
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

OTHERS = """
asyncio concurrent.futures ctypes.util logging.handlers multiprocessing.shared_memory selectors shutil ssl subprocess
tempfile unittest.mock uuid zipfile
aiohttp google.protobuf grpc grpc.aio httptools ml_dtypes msgspec ngh2 numpy numpy.testing numba onnx onnx.reference
onnxruntime ortools.sat.python.cp_model PIL.Image prometheus_client ray rich.console rich.live rich.progress scipy torch
torch.export typer.rich_utils
"""
LINUX: dict[Any, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "posix_fallocate", "eventfd"),
        *("MFD_CLOEXEC", "MFD_ALLOW_SEALING", "preadv"),
    ),
    signal: ("pidfd_send_signal",),
    mmap: ("MADV_REMOVE", "MADV_HUGEPAGE"),
    socket: ("SO_PEERCRED",),
}
"""Names that macOS lacks."""
POSIX: dict[Any, tuple[str, ...]] = {
    os: (
        *("sysconf", "sysconf_names", "getloadavg", "uname", "getuid", "geteuid", "nice", "getpriority", "setpriority"),
        *("pread", "pwrite", "fchmod", "fork", "killpg", "PRIO_PROCESS", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY"),
        *("O_NOFOLLOW", "O_DIRECTORY"),
    ),
    signal: ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGCHLD", "pthread_kill", "pthread_sigmask", "setitimer"),
    mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_SHARED"),
    socket: ("AF_UNIX", "SCM_RIGHTS", "sendmsg"),
}
"""Names that Windows lacks, too."""
HIDDEN_FILES = ("/proc", "/sys", "/dev/shm", "/dev/cpu_dma_latency")
NAMES = {"darwin": "Darwin", "win32": "Windows"}


def hide(system: str) -> None:
    """Hide the names and files that a system lacks, and say that this is it."""
    for name in OTHERS.split():
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    is_windows = system == "win32"
    for module, names in [*LINUX.items(), *(POSIX.items() if is_windows else ())]:
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in ("fcntl", "resource", "termios", "pwd", "grp") if is_windows else ():
        sys.modules[name] = None  # type: ignore[assignment]
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # Windows has none, macOS may
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "scandir")):
        setattr(module, name, _without_files(getattr(module, name)))
    ctypes.CDLL = _refused  # type: ignore[misc,assignment]
    sys.platform = system
    platform.system = lambda: NAMES[system]
    platform.release = lambda: "1"


def _without_files(call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(path: Any = ".", *rest: Any, **named: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(HIDDEN_FILES):
            raise FileNotFoundError(errno.ENOENT, "hidden", os.fspath(path))
        return call(path, *rest, **named)

    return checked


def _refused(*_: object, **__: object) -> Any:
    raise AssertionError("a C library was opened by hand")


if __name__ == "__main__":
    _, chosen, file, *arguments = sys.argv
    hide(chosen)
    sys.argv = [file, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    runpy.run_path(file, run_name="__main__")
