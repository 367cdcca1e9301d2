"""Common start of a server's processes: signals, priority, log and control channel."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable

from cotenant.execute.gpu.hardware_queues import use_all_queues
from cotenant.execute.sched_slice import SHORT_NS, set_slice
from cotenant.execute.threads.lanes import be_nice
from cotenant.linux import die_with
from cotenant.log import log_to_stderr
from cotenant.serve.processes import ControlChannel, StartServing


def prepare_process() -> None:
    """Set up the log, private file modes and short time slices. Call before libraries are loaded."""
    use_all_queues(os.environ)
    log_to_stderr()
    os.umask(os.umask(0) | 0o077)  # traces and copies of models are confidential to their tenants
    set_slice(SHORT_NS)  # serving threads run briefly; models on the same cores can wait


def run_child(serve: Callable[[ControlChannel, StartServing, list[socket.socket]], None]) -> None:
    """Run `serve` in a process that `ServerProcesses` supervises. The process ends with its supervisor. `serve` gets
    the control channel, the first message and the listening sockets."""
    _, _, descriptor, parent, nice = sys.argv
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the supervisor gets them
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
