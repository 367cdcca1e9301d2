"""Processor time of a server by kind of process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cotenant import linux
from cotenant.profiles.server_cost import ENGINE, FRONT_END, WORKER
from cotenant.serve.processor_time import LOADER, ProcessorTime


def test_the_time_of_a_process_stays_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = {7: ("cotenant.serve.frontend_process", 1.0), 8: ("cotenant.execute.worker.main", 2.0), 9: ("other", 5.0)}
    monkeypatch.setattr(linux, "processes_below", lambda pid: [(each, alive[each][0]) for each in alive])
    monkeypatch.setattr(linux, "cpu_s", lambda pid: alive[pid][1] if pid in alive else 4.0)
    time = ProcessorTime(os.getpid())
    assert time.seconds() == {ENGINE: 4.0, FRONT_END: 1.0, WORKER: 2.0, LOADER: 0.0}
    del alive[8]
    alive[10] = ("cotenant.execute.worker.main", 0.5)
    assert time.seconds() == {ENGINE: 4.0, FRONT_END: 1.0, WORKER: 2.5, LOADER: 0.0}


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/children"), reason="the kernel does not list children")
def test_processes_below_this_one_are_known_by_their_modules() -> None:
    with subprocess.Popen([sys.executable, "-u", "-m", "http.server", "0"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        assert dict(linux.processes_below(os.getpid()))[server.pid] == "http.server"
        assert linux.cpu_s(server.pid) > 0.0
        server.kill()
    assert linux.cpu_s(server.pid) == 0.0
