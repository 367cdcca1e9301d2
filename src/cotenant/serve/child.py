"""What the processes of a server set for themselves before they read or write anything."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable

from cotenant.execute.gpu.hardware_queues import use_all_queues
from cotenant.execute.sched_slice import SHORT_NS, set_slice
from cotenant.execute.threads.lanes import be_nice
from cotenant.execute.worker.child import die_with
from cotenant.log import log_to_stderr
from cotenant.serve.processes import ControlChannel, StartServing


def prepare_process() -> None:
    """Log as servers do, make files for this user alone, and run in short time slices. Before libraries are loaded."""
    use_all_queues(os.environ)
    log_to_stderr()
    os.umask(os.umask(0) | 0o077)  # traces tell of all tenants, and copies of models are theirs
    set_slice(SHORT_NS)  # what serves runs shortly, and models that compute on the same cores can wait


def run_child(serve: Callable[[ControlChannel, StartServing, list[socket.socket]], None]) -> None:
    """Be a process that `ServerProcesses` looks after: it is told what to serve, and ends with the one that does."""
    _, _, descriptor, parent, nice = sys.argv
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the process that looks after this one
        signal.signal(number, signal.SIG_IGN)
    die_with(int(parent))
    be_nice(int(nice))
    prepare_process()
    control = ControlChannel(socket.socket(fileno=int(descriptor)))
    start = control.receive()
    if isinstance(start, StartServing):
        serve(control, start, [socket.socket(fileno=each) for each in control.descriptors])
    sys.stderr.flush()
    os._exit(0)
