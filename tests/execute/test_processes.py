"""Worker processes: what becomes of launches, queries and tenants when one dies, hangs, grows or cannot load."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from client import Client, assert_balanced, feeds, sample, started
from cotenant.core.actions import Launch
from cotenant.core.events import TenantResumed, TenantSuspended
from cotenant.execute.errors import ModelError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.protocol import LoadSpec
from cotenant.execute.worker.channel import (
    AddLane,
    Channel,
    Ended,
    Open,
    Prepare,
    Ready,
    ReleaseBatch,
    Run,
    SessionsPrepared,
    Started,
)
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.execute.worker.limits import WorkerLimits
from cotenant.execute.worker.shared_tensors import SharedBuffer, SharedMemoryError, TensorLayout
from cotenant.execute.worker.worker import Worker
from cotenant.serve.server import Server
from cotenant.types import Outcome
from cotenant.work import Share, Work
from onnx_samples import Sketch, info, strings
from repositories import X, chooser, config, scaled, write_good, write_model
from workers import CORE, OTHER, WAIT_S, Host, Hosts, gone, pid_of

# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_killed_worker_fails_what_runs_and_another_one_comes(host: Host) -> None:
    host.load("a", lambda: scaled(2.0))
    host.load("b", chooser)
    pid = host.pid("a")
    os.kill(pid, signal.SIGSTOP)  # so that the launch surely runs when it dies
    launch = host.start("a", 1, X)
    os.kill(pid, signal.SIGKILL)
    reason = "the worker of 'a' was killed by signal 9"
    assert host.wait(launch) == [reason]
    host.executor.discard(1)
    host.wait_resumed()
    assert host._order == [TenantSuspended("a", reason), 1, TenantResumed("a")]
    assert host.wait(host.start("a", 2, X)) == [None]
    np.testing.assert_allclose(host.executor.take(2)["y"], 2 * X["x"] / (1 + abs(X["x"])), rtol=1e-5)
    assert host.wait(host.start("b", 3, {"index": np.array([3])}, units=1)) == [None]
    assert host.executor.take(3)["y"].tolist() == [[6.0, 7.0]]
    status = {worker.tenant: worker for worker in host.executor.workers()}
    assert (status["a"].restarts, status["b"].restarts) == ({"died": 1}, {})
    assert status["a"].pid != pid
    assert status["a"].resident_bytes > 10 << 20
    assert status["a"].start_ns > 0
    assert status["a"].load_ns > 0


def test_a_paused_batch_is_lost_with_its_worker_and_leaves_nothing(host: Host) -> None:
    host.load("a", lambda: scaled(2.0))
    host.executor.put(1, X)
    host.executor.start(Launch(1, 7, (1,), Work("a", 0, 1, 0, 1), False, CORE, 1), host._end)
    assert host.wait(1) == [None]
    assert host.executor.kept == 2  # the query's inputs, the batch in the worker
    os.kill(host.pid("a"), signal.SIGKILL)
    host.wait_resumed()
    host.executor.release(7)
    host.executor.discard(1)
    assert host.executor.kept == 0


def test_a_worker_that_hangs_is_killed_and_replaced(hosts: Hosts) -> None:
    host = hosts(WorkerLimits(hang_floor_s=0.2))
    host.load("a", lambda: scaled(2.0))
    os.kill(host.pid("a"), signal.SIGSTOP)
    [reason] = host.wait(host.start("a", 1, X))
    assert reason is not None
    assert reason.startswith("the worker of 'a' hung: a launch predicted to take 0.0 ms had not ended after 0.")
    host.wait_resumed()
    assert host.wait(host.start("a", 2, X)) == [None]
    assert host.executor.workers()[0].restarts == {"hung": 1}
    host.executor.remove_model("a")
    assert host.executor.workers() == []
    host.load("a", lambda: scaled(3.0))
    assert host.executor.workers()[0].restarts == {"hung": 1}  # another version of it resets no counter


def test_a_hang_of_one_lane_is_found_while_the_other_is_busy(tmp_path: Path) -> None:
    """Completions must not keep the watchdog from looking: its clock does not wait for silence."""
    from cotenant.execute.batches import BatchTensors
    from cotenant.execute.worker.lane_link import Pending
    from cotenant.execute.worker.limits import overdue

    limits = WorkerLimits(hang_floor_s=1.0, hang_factor=10.0)
    made = Launch(0, 0, (0,), Work("a", 0, 1, 0, 1), True, CORE, 300_000_000)
    pending = Pending(made, lambda *_: None, BatchTensors(made, []))
    tick_ns = 250_000_000
    assert [overdue([pending], tick_ns, limits) for _ in range(20)] == [None] * 20  # not sent yet: waits for its lane
    pending.is_sent = True
    looks = [overdue([pending], tick_ns, limits) for _ in range(13)]
    assert looks[:12] == [None] * 12  # seen first at 0, given up 3 s later: 10 times what was predicted
    assert looks[12] == "a launch predicted to take 300.0 ms had not ended after 3.0 s"


def test_a_worker_that_takes_too_much_memory_is_replaced(host: Host) -> None:
    host.load("a", lambda: scaled(2.0), memory_bytes=256 << 20)
    assert host.wait(host.start("a", 1, X)) == [None]
    assert host.events == []
    many = np.zeros((3_000_000, 8), np.float32)  # 96 MB there, 96 MB back, and what the model needs for itself
    [error] = host.wait(host.start("a", 2, {"x": many}))
    host.wait_resumed()
    suspended = host.events[0]
    assert isinstance(suspended, TenantSuspended)
    assert suspended.reason.startswith("the worker of 'a' exceeded its memory limit of 256 MiB (it held ")
    assert error in (None, suspended.reason)  # found when it ended, or by a slow look before
    assert host.executor.workers()[0].restarts == {"memory": 1}
    assert host.executor.workers()[0].resident_bytes < 256 << 20
    host.executor.take(1)
    host.executor.discard(2)


def test_an_idle_worker_that_takes_too_much_memory_is_found_by_the_slow_look(hosts: Hosts) -> None:
    host = hosts(WorkerLimits(hang_floor_s=0.2))
    host.load("a", lambda: scaled(2.0))
    supervisor = host.executor._supervisors["a"]
    supervisor._limits = replace(supervisor._limits, memory_bytes=1 << 20)  # less than any worker has
    host.wait_for(lambda: bool(host.events))
    assert isinstance(host.events[0], TenantSuspended)
    host.wait_for(lambda: supervisor.lasting_problem != "")
    assert host.executor.lasting_problem("a").startswith("the worker of 'a' exceeded its memory limit of 1 MiB")


def test_a_model_that_alone_exceeds_its_memory_limit_is_refused_by_the_load(hosts: Hosts) -> None:
    host = hosts()
    with pytest.raises(ModelError, match=r"the worker of 'a' exceeded its memory limit of 1 MiB \(it held \d+ MiB\)$"):
        host.load("a", lambda: scaled(2.0), memory_bytes=1 << 20)
    assert host.events == []


def test_workers_that_keep_dying_are_tried_ever_more_rarely() -> None:
    limits = WorkerLimits(backoff_s=0.5, backoff_most_s=30.0)
    assert [limits.pause_s(losses) for losses in range(9)] == [0, 0, 0.5, 1, 2, 4, 8, 16, 30]
    assert limits.pause_s(10_000) == 30.0


def test_a_model_that_cannot_be_loaded_again_is_tried_until_it_can(host: Host, tmp_path: Path) -> None:
    host.load("a", lambda: scaled(2.0))
    path = tmp_path / "a.onnx"
    content = path.read_bytes()
    path.write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "graphs")
    os.kill(host.pid("a"), signal.SIGKILL)
    host.wait_for(lambda: sum("no readable ONNX model" in line for line in host.logs) >= 2)
    assert host.executor.workers()[0].restarts["unloadable"] >= 2
    assert host.events == [TenantSuspended("a", "the worker of 'a' was killed by signal 9")]
    assert "no readable ONNX model" in host.executor.problem("a")
    assert host.executor.lasting_problem("a").startswith("the worker of 'a' cannot load its model: ")
    assert not [line for line in host.logs if line.count("the worker of 'a'") > 1]
    late = host.start("a", 1, X)
    assert "no readable ONNX model" in str(host.wait(late)[0])
    host.executor.discard(1)
    path.write_bytes(content)
    host.wait_resumed()
    assert host.executor.problem("a") == host.executor.lasting_problem("a") == ""
    assert host.wait(host.start("a", 2, X)) == [None]
    host.executor.take(2)


def test_a_worker_and_the_next_one_run_what_was_loaded_whatever_becomes_of_the_file(host: Host, tmp_path: Path) -> None:
    """New content comes by loading the model again, not by a lane that is new or a worker that died."""
    host.load("a", lambda: scaled(2.0))
    file = tmp_path / "a.onnx"
    with file.open("r+b") as opened:  # the same size, other weights
        opened.write(scaled(3.0).SerializeToString())
    whole = Share((CORE.cores[0], OTHER.cores[0])) if CORE != OTHER else CORE
    for life in range(3):
        for lane, partition in enumerate((CORE, OTHER, whole)):
            query = 10 * life + lane
            assert host.wait(host.start("a", query, X, partition=partition)) == [None]
            np.testing.assert_allclose(host.executor.take(query)["y"], 2 * X["x"] / (1 + abs(X["x"])), rtol=1e-5)
        if life == 0:
            file.write_bytes(b"cut short")
        else:
            file.unlink(missing_ok=True)
        os.kill(host.pid("a"), signal.SIGKILL)
        host.wait_resumed(life + 1)


def test_what_a_worker_runs_is_kept_until_it_is_gone(host: Host, tmp_path: Path) -> None:
    """Also when the file has been loaded anew with other content, and when nothing is left of the file."""
    host.load("a", lambda: scaled(2.0))
    (first,) = (tmp_path / "graphs").glob("*-ort*")
    old = host.executor._supervisors["a"]
    host.load("a", lambda: scaled(3.0))
    assert first.is_dir()
    old.close()
    old.join()
    assert not first.is_dir()
    (second,) = (tmp_path / "graphs").glob("*-ort*")
    (tmp_path / "a.onnx").unlink()
    host.load("b", lambda: scaled(4.0))
    assert second.is_dir()


def test_a_file_that_has_changed_is_not_taken_for_the_model(host: Host, tmp_path: Path) -> None:
    """When the copy of what was loaded is gone too: the core knows the units of that one."""
    host.load("a", lambda: scaled(2.0))
    onnx.save(chooser(), tmp_path / "a.onnx")
    shutil.rmtree(tmp_path / "graphs")
    os.kill(host.pid("a"), signal.SIGKILL)
    host.wait_for(lambda: any("its file has changed since it was loaded" in line for line in host.logs))
    assert "has changed" in host.executor.problem("a")


def test_a_loss_before_the_core_knew_the_tenant_is_told_again(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    onnx.save(scaled(1.0), path)
    model = SegmentedModel.open(path, cache_dir=tmp_path / "graphs")
    loaded = host.executor.load("a", model, LoadSpec((Share((0,)),), (0, 2)))
    host.executor.add_model("a", loaded)
    path.write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "graphs")
    os.kill(host.pid("a"), signal.SIGKILL)
    host.wait_for(lambda: bool(host.events))
    host.executor.announce("a")
    assert isinstance(host.events[-1], TenantSuspended)
    path.write_bytes(scaled(1.0).SerializeToString())
    host.wait_resumed()
    told = len(host.events)
    host.executor.announce("a")
    assert len(host.events) == told


def test_a_model_that_cannot_be_loaded_at_first_is_refused_with_the_reason(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts()
    path = tmp_path / "a.onnx"
    onnx.save(scaled(1.0), path)
    model = SegmentedModel.open(path, cache_dir=tmp_path / "graphs")
    path.write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "graphs")
    with pytest.raises(ModelError, match="no readable ONNX model") as caught:
        host.executor.load("a", model, LoadSpec((Share((0,)),), (0, 2)))
    assert caught.value.path == path
    assert host.events == []


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_text_of_any_length_crosses(host: Host) -> None:
    host.load("words", strings)
    words = ["", "zw\u00f6lf", "x" * 300_000]
    assert host.wait(host.start("words", 1, {"words": np.array([w.encode() for w in words], np.object_)}, units=1))
    assert host.ends[1] is None
    given = host.executor.take(1)
    assert all(isinstance(item, bytes) for array in given.values() for item in array.ravel())
    assert "x" * 300_000 in [item.decode() for array in given.values() for item in array.ravel()]


def verbose() -> onnx.ModelProto:
    """Outputs whose names alone are more than a message holds."""
    s = Sketch()
    names = [s.op("Mul", "x", s.constant(np.float32(at)), out=f"y{at}_{'y' * 5000}") for at in range(60)]
    return s.model([info("x", ["batch", 8])], [info(name, ["batch", 8]) for name in names])


def test_outputs_that_cannot_be_told_are_an_error_of_that_launch_alone(host: Host) -> None:
    host.load("a", verbose)
    pid = host.pid("a")
    units = 60
    for query in (1, 2):
        assert "too many tensors" in str(host.wait(host.start("a", query, X, units=units))[0])
        host.executor.discard(query)
    assert host.pid("a") == pid
    assert host.events == []


def test_buffers_grow_and_outputs_stay_what_they_were(host: Host) -> None:
    host.load("a", lambda: scaled(2.0))
    expected: dict[int, Any] = {}
    kept: dict[int, Any] = {}
    for query, rows in enumerate((1, 50_000, 3, 200_000, 0, 2)):
        x = np.random.default_rng(query).standard_normal((rows, 8)).astype(np.float32)
        assert host.wait(host.start("a", query, {"x": x}, partition=(CORE, OTHER)[query % 2])) == [None]
        kept[query] = host.executor.take(query)["y"]
        expected[query] = 2 * x / (1 + abs(x))
    for query, array in expected.items():
        np.testing.assert_allclose(kept[query], array, rtol=1e-4, atol=1e-6)


# --- the worker itself ------------------------------------------------------------------------------------------------


def test_a_worker_keeps_tensors_of_paused_batches_alone(tmp_path: Path) -> None:
    """In this process, so that one can look inside."""
    path = tmp_path / "a.onnx"
    onnx.save(scaled(2.0), path)
    with SegmentedModel.open(path, cache_dir=tmp_path / "graphs") as model:
        graph = model.graph_path.parent
    ours, theirs = Channel.pair()
    worker = Worker(theirs)
    thread = threading.Thread(target=worker.serve, daemon=True)
    thread.start()
    assert ours.receive() == Started()
    ours.send(Open("a", str(path), str(graph.parent), graph.name, ((1, ((0, 1), (1, 2))),), 0))
    assert ours.receive() == Ready()
    lane, lanes_end = Channel.pair()
    inputs, outputs = SharedBuffer.create("in"), SharedBuffer.create("out")
    ours.send_with(AddLane(CORE.cores), [lanes_end.fileno(), inputs.descriptor, outputs.descriptor])
    lanes_end.close()

    def run(launch: int, batch: int, start: int, end: int, x: Any = None) -> Ended:
        layouts = () if x is None else inputs.write({"x": [x]})
        lane.send(Run(launch, batch, Work("a", 0, 1, start, end), end == 2, layouts))
        ended = ours.receive()
        assert isinstance(ended, Ended)
        assert ended.launch == launch
        return ended

    assert run(0, 5, 0, 1, X["x"]).error is None
    assert run(1, 6, 0, 1, X["x"] * 0).error is None  # takes the place of the inputs of batch 5
    assert worker.paused == 2
    last = run(2, 5, 1, 2)
    expected = 2 * X["x"] / (1 + abs(X["x"]))
    np.testing.assert_allclose(outputs.read(last.outputs, copy=True)["y"], expected, rtol=1e-5)
    assert worker.paused == 1
    assert "is not loaded any more" in str(run(3, 5, 1, 2).error)
    assert "has shape" in str(run(4, 8, 0, 1, np.zeros((1, 9), np.float32)).error)
    assert worker.paused == 1  # a batch that fails is forgotten
    assert run(6, 6, 1, 2).error is None
    assert worker.paused == 0
    run(5, 7, 0, 1, X["x"])
    ours.send(ReleaseBatch(7))
    lane.shut()
    ours.shut()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert worker.paused == 0
    for end in (ours, theirs, lane, inputs, outputs):
        end.close()


class Sessions:
    """A model that remembers which sessions it was asked for, and which it ran with."""

    unit_count = 2
    inputs = ()

    def __init__(self) -> None:
        self.prepared: list[Any] = []
        self.ran: list[Any] = []

    def prepare(self, ranges: Any, threads: Any) -> None:
        self.prepared.append((ranges, threads))

    def run(self, start: int, end: int, tensors: Any, threads: Any) -> Any:
        self.ran.append((start, end, threads))
        return tensors


def test_a_worker_prepares_sessions_for_the_threads_that_will_run_them() -> None:
    ours, theirs = Channel.pair()
    model = Sessions()
    wanted = Prepare(((1, ((0, 2),)), (3, ((0, 1), (1, 2)))), {})
    Worker(theirs)._prepare(model, wanted)  # type: ignore[arg-type]
    assert ours.receive() == SessionsPrepared()
    assert model.prepared == [(((0, 2),), 1), (((0, 1), (1, 2)), 3)]
    assert model.ran == [(0, 2, 1), (0, 2, 3), (0, 1, 3), (1, 2, 3)]
    ours.close()
    theirs.close()


def test_a_place_outside_of_a_buffer_is_refused() -> None:
    buffer = SharedBuffer.create("test")
    [layout] = buffer.write({"x": [np.zeros((2, 3), np.float32)]})
    size = os.fstat(buffer.descriptor).st_size
    for wrong in (
        TensorLayout("x", "<f4", (2, 3), size - 8, 24),
        TensorLayout("x", "<f4", (2, 300_000), 0, 2_400_000),
        TensorLayout("x", "<f4", (2, 4), layout.offset, layout.nbytes),
    ):
        with pytest.raises(SharedMemoryError):
            buffer.read((wrong,), copy=True)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(buffer.descriptor, 0)
    with pytest.raises(ValueError, match="dimension"):
        buffer.write({"x": [np.zeros((1, 3)), np.zeros((1, 4))]})
    buffer.close()


def test_a_buffer_remembers_the_forms_of_launches_and_keeps_each_apart() -> None:
    ours = SharedBuffer.create("test")
    theirs = SharedBuffer(os.dup(ours.descriptor))
    generator = np.random.default_rng(5)
    sizes = [(1,), (2,), (1, 2), (3,), (1, 1, 1), (1,), (2, 1), (40_000,), (1, 2), *[(rows,) for rows in range(1, 50)]]
    for rows in sizes * 2:
        pieces = [generator.random((count, 4), np.float32) for count in rows]
        mask = np.array([len(rows) > 1])
        layouts = ours.write({"x": pieces, "mask": [mask]})
        sent = tuple([TensorLayout(each.name, each.dtype, each.shape, each.offset, each.nbytes) for each in layouts])
        found = theirs.read(sent, copy=True)
        np.testing.assert_array_equal(found["x"], np.concatenate(pieces))
        np.testing.assert_array_equal(found["mask"], mask)
    with pytest.raises(ValueError, match="dimension"):
        ours.write({"x": [np.zeros((1, 4), np.float32), np.zeros((1, 5), np.float32)], "mask": [mask]})
    ours.close()
    theirs.close()


# --- life of processes ------------------------------------------------------------------------------------------------


def test_signals_for_the_server_do_not_reach_the_workers(host: Host) -> None:
    host.load("a", lambda: scaled(2.0))
    pid = host.pid("a")
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert host.wait(host.start("a", 1, X)) == [None]
    host.executor.take(1)
    assert host.pid("a") == pid
    assert host.events == []


def test_workers_die_with_a_server_that_is_killed(tmp_path: Path) -> None:
    onnx.save(scaled(1.0), tmp_path / "a.onnx")
    code = f"""
from collections.abc import Callable, Iterator
from pathlib import Path
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.protocol import LoadSpec
from cotenant.work import Share
if __name__ == "__main__":
    executor = ProcessExecutor()
    model = SegmentedModel.open(Path({str(tmp_path / "a.onnx")!r}), cache_dir=Path({str(tmp_path / "graphs")!r}))
    executor.add_model("a", executor.load("a", model, LoadSpec((Share((0,)),), (0, 2))))
    print(executor.workers()[0].pid, flush=True)
    input()
"""
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        os.kill(worker, signal.SIGSTOP)  # it cannot notice anything by itself
        server.kill()
        gone(worker)
    finally:
        server.kill()
        server.communicate(timeout=WAIT_S)


def test_closing_ends_the_workers_also_one_that_does_not_want_to(hosts: Hosts) -> None:
    host = hosts(WorkerLimits(hang_floor_s=0.2))
    host.load("a", lambda: scaled(2.0))
    host.load("b", lambda: scaled(2.0))
    pids = [host.pid("a"), host.pid("b")]
    os.kill(pids[1], signal.SIGSTOP)
    host.executor.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert host.events == []


# --- a whole server ---------------------------------------------------------------------------------------------------


Serve = Callable[[Path], Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers of repositories; they end with the test, however it ends."""
    made: list[Server] = []

    def start(root: Path) -> Server:
        made.append(started(root))
        return made[-1]

    yield start
    for each in made:
        each.stop()


def worker_of(server: Server, tenant: str) -> int:
    assert isinstance(server._executor, ProcessExecutor)
    return pid_of(server._executor, tenant)


def test_running_queries_fail_queued_ones_are_answered_and_others_notice_nothing(tmp_path: Path, serve: Serve) -> None:
    server = serve(write_good(tmp_path / "models", "two", "chooser"))
    client = Client(server)
    lanes = len(server.lanes)
    pid = worker_of(server, "chooser")
    os.kill(pid, signal.SIGSTOP)
    numbers = [client.submit("chooser", {"index": np.array([n])}) for n in range(lanes + 3)]
    other = client.submit("two", feeds("two"))
    os.kill(pid, signal.SIGKILL)
    results = client.wait(*numbers)
    assert client.wait(other)[0].outcome is Outcome.ANSWERED
    failed, answered = results[:lanes], results[lanes:]
    assert {each.reason for each in failed} == {"the worker of 'chooser' was killed by signal 9"}
    assert {each.outcome for each in failed} == {Outcome.FAILED}
    assert [each.outputs["y"][0, 0] for each in answered] == [2.0 * n for n in range(lanes, lanes + 3)]
    assert {each.outcome for each in answered} == {Outcome.ANSWERED}
    page = server.metrics().decode()
    assert sample(page, "cotenant_worker_restarts_total", tenant="chooser", reason="died") == 1
    assert sample(page, "cotenant_worker_resident_bytes", tenant="chooser") > 10 << 20
    assert sample(page, "cotenant_tenant_cpu_seconds_total", tenant="chooser") > 0.0
    assert server.model_ready("chooser", "")
    assert client.twice == 0
    assert_balanced(server)


@pytest.mark.alone
def test_kills_under_load_lose_no_query_and_cost_other_tenants_none(tmp_path: Path, serve: Serve) -> None:
    root = write_good(tmp_path / "models", "two", "add_sub")
    write_model(root, "victim", config(), {1: chooser})
    server = serve(root)
    client = Client(server)
    stop = threading.Event()
    sent: dict[int, str] = {}
    crashed: list[BaseException] = []

    def send(which: int) -> None:
        seed = which
        try:
            while not stop.is_set():
                seed += 1
                model = ("two", "victim", "add_sub")[seed % 3]
                inputs = {"index": np.array([seed % 10])} if model == "victim" else feeds(model, seed)
                number = client.submit(model, inputs)
                sent[number] = model
                if seed % 4:
                    client.wait(number)
        except BaseException as error:
            crashed.append(error)

    threads = [threading.Thread(target=send, args=(which,), daemon=True) for which in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            pid = worker_of(server, "victim")
            os.kill(pid, signal.SIGKILL)
            gone(pid)
            while client.ask("victim", {"index": np.array([5])}).outcome is not Outcome.ANSWERED:
                pass  # it ran when the worker died; the next one waits for the new worker
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert crashed == []
    results = dict(zip(sent, client.wait(*sent), strict=True))
    assert client.twice == 0
    assert {results[number].outcome for number, model in sent.items() if model != "victim"} == {Outcome.ANSWERED}
    victims = [results[number] for number, model in sent.items() if model == "victim"]
    assert {each.outcome for each in victims} <= {Outcome.ANSWERED, Outcome.FAILED}
    assert {each.reason for each in victims if each.outcome is Outcome.FAILED} <= {
        "the worker of 'victim' was killed by signal 9"
    }
    assert server.driver.wait_idle(WAIT_S)
    assert_balanced(server)
