"""Child processes of the server: starts, monitors and ends them. They end with the server, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys

from cotenant import linux

KILLED = "was killed by signal 9"
"""Result of `ChildProcess.wait` for a process that a user, or the kernel out of memory, killed."""


class ChildProcess:
    """A Python module run as `python -m MODULE NAME DESCRIPTOR PARENT NICE`; see `worker.main`.

    The kernel kills the process when the thread that made this object ends. Raises OSError when it cannot be started.
    """

    def __init__(self, module: str, name: str, descriptor: int, nice: int) -> None:
        words = [name.replace("\0", " "), str(descriptor), str(os.getpid()), str(nice)]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the server's own may be read by a program
            pass_fds=(descriptor,),
            process_group=0,  # Ctrl-C in a terminal is for the server, which drains first
        )
        try:
            self._statm = linux.open_statm(self._popen.pid)
        except OSError:
            self._popen.kill()
            self._popen.wait()
            raise

    @property
    def pid(self) -> int:
        """Process number."""
        return self._popen.pid

    def resident_bytes(self) -> int:
        """Resident memory, shared pages included; 0 once it is dead."""
        return linux.resident_bytes(self._statm)

    def cpu_s(self) -> float:
        """Processor time that it has used, all threads, in seconds; 0.0 once it is gone."""
        return linux.cpu_s(self._popen.pid)

    def kill(self) -> None:
        """Kill the process."""
        self._popen.kill()

    def wait(self) -> str:
        """Wait for its end; returns how it ended, for example 'was killed by signal 9'."""
        status = self._popen.wait()
        return f"was killed by signal {-status}" if status < 0 else f"ended by itself with status {status}"

    def close(self) -> None:
        """Free its resources in the server; only after `wait`."""
        os.close(self._statm)
