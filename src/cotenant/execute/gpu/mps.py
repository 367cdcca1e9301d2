"""NVIDIA's Multi-Process Service (MPS): worker processes on one GPU at the same time, each with a share of its SMs.

The share of a process is fixed when it opens the GPU: a new division needs new processes, which green contexts
(`sm_shares`) do without. MPS is for tenants in processes of their own. Source: NVIDIA's guide to the service.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cotenant.errors import InvalidValueError
from cotenant.execute.gpu.cuda_driver import GpuError

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")  # where a daemon is that nobody told otherwise
_POLL_S = 0.02


def find_control(control: str = CONTROL) -> str:
    """Path of the daemon's program. Raises GpuError when it is not installed."""
    path = shutil.which(control)
    if path is None:
        raise GpuError(f"there is no {control} in PATH; it comes with the NVIDIA driver's compute utilities")
    return path


def is_running(pipes: Path | None = None) -> bool:
    """Whether a daemon answers on this directory (that of the environment, or the default one). Takes 10 s at most."""
    pipes = pipes or Path(os.environ.get(PIPES, DEFAULT_PIPES))
    try:
        _number(_ask(find_control(), {PIPES: str(pipes)}, "get_default_active_thread_percentage", 10.0))
    except GpuError:
        return False
    return True


def environment_of(pipes: Path, percentage: float | None = None) -> dict[str, str]:
    """What a process needs in its environment to be a client, bound to a percentage of the SMs if one is given.

    Raises InvalidValueError for a percentage that is not above 0 and at most 100.
    """
    if percentage is None:
        return {PIPES: str(pipes)}
    return {PIPES: str(pipes), PERCENTAGE: _checked(percentage)}


class MpsDaemon:
    """An MPS daemon of our own, in directories of its own, so that it meets no other. Stop it, or use it in a `with`.

    It is stopped also when this process ends without doing so, even by a signal that cannot be caught: a guard process
    watches (`execute.gpu.mps_guard`).
    """

    def __init__(
        self, control: str, directory: Path, guard: subprocess.Popen[bytes], limit_s: float, quit_s: float
    ) -> None:
        self._control = control
        self._directory = directory
        self._guard = guard
        self._limit_s = limit_s
        self._quit_s = quit_s
        self.pipes = directory / "pipes"
        self.logs = directory / "logs"

    @classmethod
    def start(cls, control: str = CONTROL, limit_s: float = 20.0, quit_s: float = 10.0) -> Self:
        """Start a daemon and wait until it answers. Raises GpuError when it does not within `limit_s`.

        When it is stopped it has `quit_s` to end; then it is killed.
        """
        control = find_control(control)
        directory = Path(tempfile.mkdtemp(prefix="cotenant-mps-"))
        (directory / "pipes").mkdir()
        (directory / "logs").mkdir()
        ours = {PIPES: str(directory / "pipes"), LOGS: str(directory / "logs")}
        try:
            python = (sys.executable, "-P", "-m")
            with (directory / "logs" / "guard.log").open("wb") as log:
                guard = subprocess.Popen(
                    [*python, "cotenant.execute.gpu.mps_guard", control, str(directory), str(quit_s)],
                    env={**os.environ, **ours},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                )
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise GpuError(f"the guard of the MPS daemon cannot be started ({error.strerror})") from None
        daemon = cls(control, directory, guard, limit_s, quit_s)
        try:
            daemon._wait_until_ready()
        except BaseException:
            daemon.stop()
            raise
        return daemon

    @property
    def is_alive(self) -> bool:
        """Whether the daemon runs."""
        return self._guard.poll() is None

    def ask(self, command: str) -> str:
        """Give the daemon a command; what it answers, without white space around. Raises GpuError when it refuses."""
        if not self.is_alive:
            raise GpuError("the MPS daemon has ended")
        return _ask(self._control, {PIPES: str(self.pipes), LOGS: str(self.logs)}, command, self._limit_s)

    def servers(self) -> tuple[int, ...]:
        """The processes that serve clients: none before the first client has come."""
        return tuple(int(word) for word in self.ask("get_server_list").split() if word.isdecimal())

    @property
    def percentage(self) -> float:
        """Percentage of the SMs that clients of servers to come may use at most."""
        return _number(self.ask("get_default_active_thread_percentage"))

    def set_percentage(self, percentage: float) -> None:
        """Bound clients to come, those of servers that are there already too. Raises InvalidValueError, GpuError."""
        text = _checked(percentage)
        self.ask(f"set_default_active_thread_percentage {text}")
        for server in self.servers():
            self.ask(f"set_active_thread_percentage {server} {text}")

    def percentage_of(self, server: int) -> float:
        """Percentage of the SMs that clients of this server may use at most."""
        return _number(self.ask(f"get_active_thread_percentage {server}"))

    def environment(self, percentage: float | None = None) -> Mapping[str, str]:
        """See `environment_of`."""
        return environment_of(self.pipes, percentage)

    def stop(self) -> None:
        """End the daemon, with what its clients still do, and wait until it has ended; harmless when it has."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            self._guard.wait(self._limit_s + 2 * self._quit_s)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + self._limit_s
        while True:
            status = self._guard.poll()
            if status is not None:
                log = (self.logs / "guard.log").read_text(encoding="utf-8", errors="replace").strip()
                raise GpuError(
                    f"the MPS daemon ended with status {status} when it was started{': ' + log if log else ''}"
                )
            try:
                _ = self.percentage
            except GpuError as error:
                if time.monotonic() > until:
                    raise GpuError(f"the MPS daemon did not answer within {self._limit_s:g} s: {error}") from None
                time.sleep(_POLL_S)
            else:
                return


def _ask(control: str, variables: Mapping[str, str], command: str, limit_s: float) -> str:
    try:
        done = subprocess.run(
            [control],
            input=command + "\n",
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GpuError(f"the MPS daemon did not answer to {command!r} within {limit_s:g} s") from None
    except OSError as error:
        raise GpuError(f"{control} cannot be run ({error.strerror})") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise GpuError(f"the MPS daemon refused {command!r}: {said or f'status {done.returncode}'}")
    return done.stdout.strip()


def _checked(percentage: float) -> str:
    if not 0 < percentage <= 100:
        raise InvalidValueError("MPS", "percentage", percentage, "a share above 0 and at most 100 %")
    return f"{percentage:g}"


def _number(answer: str) -> float:
    try:
        return float(answer.split()[-1])
    except (IndexError, ValueError):
        raise GpuError(f"the MPS daemon answered {answer!r}, expected a percentage") from None
