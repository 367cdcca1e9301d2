"""The main program of a worker process.

Started by `worker.process` as `python -m cotenant.execute.worker.main TENANT DESCRIPTOR PARENT NICE`. It ends when the
server closes the channel or dies. Heavy imports come after the set-up.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from cotenant.execute.threads.lanes import be_nice, run_gently
from cotenant.linux import die_with


def main() -> None:
    """Run a worker."""
    _, _, descriptor, parent, nice = sys.argv
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server, which drains first
        signal.signal(number, signal.SIG_IGN)
    die_with(int(parent))
    be_nice(int(nice))
    run_gently(lambda: _worker(int(descriptor))).serve()
    sys.stderr.flush()
    os._exit(0)  # skips the slow clean-up of libraries


def _worker(descriptor: int) -> Any:
    import socket

    from cotenant.execute.worker.channel import Channel
    from cotenant.execute.worker.worker import Worker

    return Worker(Channel(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
