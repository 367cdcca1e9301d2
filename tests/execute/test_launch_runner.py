"""What the thread of a lane does with a launch, and the cores that it is bound to."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from cotenant.core.actions import Launch
from cotenant.execute.batches import Batches
from cotenant.execute.launch_runner import LaunchRunner
from cotenant.execute.threads.lanes import settle
from cotenant.work import Share, Work


def test_a_lane_is_bound_to_its_first_core() -> None:
    core = max(os.sched_getaffinity(0))
    found: list[Any] = []

    def work() -> None:
        settle((core, 7), 3)
        found.extend((os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cores, nice = found
    assert cores == {core}
    assert nice >= 3


@pytest.mark.parametrize(("share", "threads"), [(Share((4,)), 1), (Share((4, 2)), (4, 2))], ids=str)
def test_models_run_with_the_cores_of_a_share_where_it_has_several(share: Share, threads: Any) -> None:
    found: list[Any] = []

    class Model:
        def run(self, start: int, end: int, tensors: Any, threads: Any) -> Any:
            found.append(threads)
            return tensors

    model: Any = Model()
    batches = Batches()
    batches.put(0, {})
    launch = Launch(0, 0, (0,), Work("a", 0, 1, 0, 1), True, share, 0)
    ends: list[str | None] = []
    LaunchRunner(batches).run(
        launch, share, model, batches.begin(launch), batches.finish, lambda _, error, timing: ends.append(error)
    )
    assert (found, ends) == ([threads], [None])
