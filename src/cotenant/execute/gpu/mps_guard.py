"""The process that keeps an MPS daemon: it starts it, and stops it when whoever started the guard is gone.

Started by `gpu.mps` as `python -m cotenant.execute.gpu.mps_guard CONTROL DIRECTORY SECONDS`. Its standard input is a
pipe that nobody writes to: it ends with the process that holds the other end, however that one ends. The daemon then
has the seconds to end by itself, with half of them for its clients, and the directory is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Be the guard; ends with the status of the daemon."""
    _, control, directory, quit_s = sys.argv
    told = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the server, whose end is what counts
        signal.signal(number, signal.SIG_IGN)
    daemon = subprocess.Popen(
        [control, "-f"], stdin=subprocess.DEVNULL, restore_signals=True, preexec_fn=_default_signals, process_group=0
    )
    threading.Thread(target=_stop_at_end_of_input, args=(control, daemon, told, float(quit_s)), daemon=True).start()
    status = daemon.wait()
    _kill_group(daemon.pid)  # servers that it left behind
    if told.is_set():
        shutil.rmtree(directory, ignore_errors=True)
    return status


def _stop_at_end_of_input(control: str, daemon: subprocess.Popen[bytes], told: threading.Event, quit_s: float) -> None:
    while os.read(0, 4096):
        pass
    told.set()
    try:
        command = f"quit -t {max(1, int(quit_s / 2))}\n"
        subprocess.run([control], input=command.encode(), timeout=quit_s, check=False, capture_output=True)
        daemon.wait(quit_s)
    except (OSError, subprocess.TimeoutExpired):
        pass
    finally:
        _kill_group(daemon.pid)


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main())
