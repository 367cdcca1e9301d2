"""Threads that serve have short time slices, and those that compute have the usual one, on kernels that know them."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import until
from cotenant import linux
from cotenant.execute.sched_slice import DEFAULT, SHORT_NS, current_slice, default_slice, set_slice
from cotenant.execute.threads.lanes import Lane
from cotenant.wire.client import infer_once
from cotenant.work import Share
from processes import processes_of, serving, workers_of
from repositories import X, write_good

WAIT_S = 20.0
CORE = min(os.sched_getaffinity(0))


@pytest.fixture
def short() -> Iterator[None]:
    """Runs the test with a short slice, where there is such a thing."""
    if not (set_slice(SHORT_NS) and current_slice() == SHORT_NS):
        set_slice(DEFAULT)
        pytest.skip("this kernel has no time slices of threads: Linux 6.12 or newer has")
    yield
    set_slice(DEFAULT)


def slice_on_a_new_thread() -> int | None:
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(current_slice()), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return found[0]


def test_new_threads_have_it_too(short: None) -> None:
    assert slice_on_a_new_thread() == SHORT_NS


def test_threads_of_libraries_can_be_left_out(short: None) -> None:
    with default_slice():
        assert slice_on_a_new_thread() not in (None, SHORT_NS)
    assert current_slice() == SHORT_NS


def test_lanes_have_the_usual_one(short: None) -> None:
    found: list[int | None] = []
    lane = Lane(Share((CORE,)))
    lane.put(lambda: found.append(current_slice()))
    lane.close()
    assert found[0] not in (None, SHORT_NS)


def test_a_default_slice_stays(short: None) -> None:
    set_slice(DEFAULT)
    before = current_slice()
    with default_slice():
        assert current_slice() == before
    assert current_slice() == before


@pytest.mark.parametrize("frontends", ["0", "1"])
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_server_has_short_ones_and_its_lanes_do_not(
    short: None, tmp_path: Path, isolation: str, frontends: str
) -> None:
    root = write_good(tmp_path / "models", "two")
    set_slice(DEFAULT)  # the server shall not have it from here
    with serving(root, "--isolation", isolation, "--frontends", frontends) as process:
        infer_once(process.url, "two", X)
        until(lambda: are_set(process.popen.pid), lambda: time.sleep(0.05))  # lanes set themselves when they begin
        assert current_slice(process.popen.pid) == SHORT_NS
        for front_end in processes_of(process.popen.pid, "serve.frontend_process"):
            assert current_slice(front_end) == SHORT_NS


def are_set(pid: int) -> bool:
    """Whether threads of a server and its workers that serve have short slices, and those that compute have not."""
    serves: list[int | None] = []
    computes: list[int | None] = []
    try:
        for number in [pid, *processes_of(pid, "serve.engine_process"), *workers_of(pid)]:
            for task in Path(f"/proc/{number}/task").iterdir():
                is_nice = os.getpriority(os.PRIO_PROCESS, int(task.name)) > os.getpriority(os.PRIO_PROCESS, 0)
                (computes if is_nice else serves).append(current_slice(int(task.name)))
    except OSError:  # one of them has just ended
        return False
    # the loop, the clock and others are five; pools that libraries made before have the usual one
    return serves.count(SHORT_NS) >= 5 and bool(computes) and SHORT_NS not in computes


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "IS_LINUX", False)
    assert not set_slice(SHORT_NS)
    assert current_slice() is None
    with default_slice():
        pass


def test_a_kernel_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linux._CALLS, "sched_getattr", {platform.machine(): 1 << 20})
    assert not set_slice(SHORT_NS)
    assert current_slice() is None
