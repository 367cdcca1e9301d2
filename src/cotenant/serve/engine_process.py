"""Main program of the engine process: models, scheduling and workers. Front-ends run in other processes."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path

from cotenant.serve.child import run_child
from cotenant.serve.processes import ControlChannel, HangUp, StartServing, Stop, Unable, Up, loads_folder

_LATE_S = 0.3
"""Seconds after the deadline of a stop at which the process exits in any case."""


def _serve(control: ControlChannel, start: StartServing, listening: list[socket.socket]) -> None:
    from cotenant.errors import CotenantError
    from cotenant.execute.worker.kept_workers import KeptWorkers
    from cotenant.serve.link.front_links import FrontLinks
    from cotenant.serve.models.stored_loads import StoredLoads
    from cotenant.serve.serving import Serving

    workers = KeptWorkers(listening[1])
    try:
        serving = Serving(Path(start.repository), start.settings, stale=start.stale)
    except CotenantError as error:
        control.send(Unable(str(error)))
        return
    serving.server.processor_time.root = os.getppid()
    serving.server.outlive(workers, StoredLoads(loads_folder(start.path)))
    stopped = threading.Event()
    until_s = [0.0]

    def listen_to() -> None:
        while (message := control.receive()) is not None:
            if isinstance(message, Stop):
                until_s[0] = message.until_s
                serving.server.cancel_loads()
                stopped.set()
                time.sleep(max(0.0, message.until_s + _LATE_S - time.monotonic()))
                logging.getLogger("cotenant.server").error("stopping has not ended in time: the engine ends now")
                serving.close_trace()
                os._exit(1)
            if isinstance(message, HangUp):
                serving.hang_up()
        os._exit(1)

    threading.Thread(target=listen_to, name="cotenant-control", daemon=True).start()
    links = FrontLinks(serving.server, serving.loop, listening[0])
    try:
        serving.server.names.on_change = links.changed
        serving.server.on_gates = links.gates_changed
        links.start()
        serving.start(records=start.records)
        workers.release()
        if not stopped.is_set():
            serving.follow_plan()
            control.send(Up(serving.report()))
            stopped.wait()
    except CotenantError as error:
        control.send(Unable(str(error)))
    finally:
        serving.stop(until_s[0] or time.monotonic())
        links.close()
        serving.close()


if __name__ == "__main__":
    run_child(_serve)
