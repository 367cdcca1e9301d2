"""The operating-system process of a worker, seen from the server: starting, looking at, and ending it."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import StrEnum

from cotenant.execute.worker.channel import Channel

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class WorkerState(StrEnum):
    """Whether launches can be sent to a worker."""

    DOWN = "down"
    UP = "up"
    FAILING = "failing"
    """Lost; the core is being told, and may still start launches, which will fail with the others."""


class WorkerProcess:
    """A worker that has been started. The thread that makes it must live as long as it: the kernel ends it then."""

    def __init__(self, tenant: str, nice: int) -> None:
        self.channel, theirs = Channel.pair()
        module = [sys.executable, "-P", "-m", "cotenant.execute.worker.main"]
        try:
            self._popen = subprocess.Popen(
                [*module, tenant.replace("\0", " "), str(theirs.fileno()), str(os.getpid()), str(nice)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the server's own may be read by a program
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C in a terminal is for the server, which drains first
            )
        except OSError:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self._statm = os.open(f"/proc/{self._popen.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._popen.pid

    def resident_bytes(self) -> int:
        """Resident memory, shared pages included; 0 once it is dead."""
        try:
            return int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def kill(self) -> None:
        """End it at once."""
        self._popen.kill()

    def wait(self) -> str:
        """Wait for its end and say how it came about, for example 'was killed by signal 9'."""
        status = self._popen.wait()
        return f"was killed by signal {-status}" if status < 0 else f"ended by itself with status {status}"

    def close(self) -> None:
        """Let go of what the server holds of it; only after `wait`."""
        self.channel.close()
        os.close(self._statm)
