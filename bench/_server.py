"""Servers under test: real `cotenant serve` processes, and the repositories that they serve."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench._registry import BenchError
from cotenant.measure.busy import LOAD_PROCESS
from cotenant.serve.server_process import RunningServer, running
from cotenant.zoo import build

TINY_CONFIG = "[tenant]\nslo_ms = 1000\n\n[model]\nmax_batch = 8\n\n[[model.shapes]]\nx = [1, 16]\n"
FRONT_END = b"cotenant.serve.frontend_process"
ENGINE = b"cotenant.serve.engine_process"
LOADER = b"cotenant.measure.loader_process"
_WORKER = b"cotenant.execute.worker.main"


@contextmanager
def tiny_repository(model: str = "tiny") -> Iterator[Path]:
    """A repository with one model that does next to nothing: FP32 [batch, 16] in and out."""
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as name:
        root = Path(name) / "models"
        (root / model).mkdir(parents=True)
        (root / model / "config.toml").write_text(TINY_CONFIG, encoding="utf-8")
        build(model, root / model / "1" / "model.onnx")
        yield root


@contextmanager
def serving(repository: Path, *options: str, cores: Sequence[int] = ()) -> Iterator[RunningServer]:
    """Run `cotenant serve` on free ports, kept on `cores` when given, until the block ends.

    Raises StartError, with the last line of its log, when it does not start.
    """
    with (
        tempfile.NamedTemporaryFile(prefix="cotenant-bench-") as log,
        running("serve", str(repository), *options, log=Path(log.name), cores=cores) as server,
    ):
        yield server


@contextmanager
def awake(cores: Sequence[int]) -> Iterator[None]:
    """Keep cores from sleeping: a loop on each, of a priority below all else, so that it takes no time from others."""
    code = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\n"
    code += f"open('/proc/self/comm', 'w').write({LOAD_PROCESS!r})\n"  # it takes time that nothing else wants
    code += "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile os.getppid() == int(sys.argv[2]): pass"
    loops = [subprocess.Popen([sys.executable, "-c", code, str(core), str(os.getpid())]) for core in cores]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def cache_folder() -> Path:
    """Where benchmarks keep what takes long to make: models, and the environments of peers. May be removed."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cotenant-bench"


def family(pid: int) -> list[int]:
    """A process and all processes below it that there are."""
    found, at = [pid], 0
    while at < len(found):
        for listing in sorted(Path(f"/proc/{found[at]}/task").glob("*/children")):
            with suppress(OSError):  # the thread has ended
                found += [int(child) for child in listing.read_text().split()]
        at += 1
    return found


def command(pid: int) -> list[bytes]:
    """The words that a process was started with; none where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def processes_of(server: RunningServer, module: bytes) -> list[int]:
    """The processes of a server that run a module (ENGINE, FRONT_END, LOADER), the oldest first."""
    return [pid for pid in family(server.process.pid) if module in command(pid)]


def without_workers(server: RunningServer) -> list[int]:
    """The processes of a server that run no model: one, or an engine with its front-ends and what looks after them."""
    return [pid for pid in family(server.process.pid) if _WORKER not in command(pid)]


def rss_mb(*pids: int) -> float:
    """Resident memory of processes together, in units of 10^6 bytes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_by_process(pids: Iterable[int]) -> dict[int, float]:
    """Processor time that each process has taken, in microseconds. A process that has ended is left out."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            found[pid] = (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")
    return found


def worker_pid(server: RunningServer, tenant: str) -> int:
    """The worker process of a tenant. Raises BenchError when there is none."""
    for pid in family(server.process.pid):
        words = command(pid)
        if _WORKER in words and tenant.encode() in words:
            return pid
    raise BenchError(f"the server has no worker of {tenant!r}")
