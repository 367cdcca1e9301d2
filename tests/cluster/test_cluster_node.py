"""The server of a node, without Ray: real processes that get parts of a plan, one after the other."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from cotenant.cluster.node_server import PLAN_FILE, STOP_MARGIN_S, NodeServer
from cotenant.cluster.types import Address, ClusterError, NodePlan, Served
from cotenant.repository import MEASURED
from cotenant.serve.server_process import StartError
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load, PartitionPlan, Slot
from cotenant.techniques.partitions.serve.plan_lanes import Cores, open_plan
from cotenant.wire.client import infer_once
from cotenant.wire.encode import ClientError
from repositories import SLO_MS, write_good

CORE = DeviceType("core", ((1,),), 1 << 40)
MODEL = {"Owner of two": "two", "chooser": "chooser"}
X = {"x": np.ones((3, 8), np.float32)}
INDEX = {"index": np.array([1])}
WAIT_S = 30.0


def part(*tenants: str, guests: tuple[str, ...] = ()) -> NodePlan:
    slots = tuple(Slot(tenant, 1, 5.0) for tenant in tenants)
    return NodePlan(
        DevicePlan("core", (PartitionPlan(1, 100_000_000, slots),)),
        CORE,
        tuple(Load(tenant, MODEL[tenant], 5.0, SLO_MS * 1_000_000) for tenant in tenants),
        tuple(sorted(MODEL[tenant] for tenant in (*tenants, *guests))),
        guests,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = write_good(tmp_path / "models", *MODEL.values())
    # what the cluster decides is left out of the node's settings
    (made / "cotenant.toml").write_text('[server]\nhttp_port = 1\n[plan]\nfile = "no such file"\nperiod_s = 1.0\n')
    return made


@pytest.fixture
def node(root: Path) -> Iterator[NodeServer]:
    made = NodeServer(root, sorted(os.sched_getaffinity(0))[:1], "127.0.0.1")
    try:
        yield made
    finally:
        made.stop()


def test_a_node_has_the_models_of_its_part_and_no_others(node: NodeServer) -> None:
    assert node.report().address is None
    address = node.prepare(part("Owner of two"))
    url = f"http://127.0.0.1:{address.http_port}"
    assert infer_once(url, "two", X)["y"].shape == (3, 8)
    with pytest.raises(ClientError, match="is unknown"):
        infer_once(url, "chooser", INDEX)
    report = node.report()
    assert report.plan == part("Owner of two").plan.digest
    assert (report.address, report.problem, report.agent_pid) == (address, "", os.getpid())
    assert report.served == {"two": Served(rows=3, queries=1)}

    both = part("Owner of two", "chooser")
    assert node.prepare(both) == address
    assert infer_once(url, "chooser", INDEX)["y"].tolist() == [[2.0, 3.0]]  # loaded, before the plan has it
    node.apply(both)
    node.apply(both)  # nothing to wait for
    assert node.report().plan == both.plan.digest

    other = part("chooser")
    node.prepare(other)
    node.apply(other)
    node.release(other)
    assert infer_once(url, "chooser", INDEX)["y"].tolist() == [[2.0, 3.0]]
    with pytest.raises(ClientError, match="is not served: it was unloaded"):
        infer_once(url, "two", X)
    guest = part("chooser", guests=("Owner of two",))
    node.prepare(guest)
    node.apply(guest)
    assert infer_once(url, "two", X)["y"].shape == (3, 8)  # in what the plan leaves
    with pytest.raises(ClusterError, match="no_model/load"):
        node.prepare(NodePlan(other.plan, CORE, other.loads, ("chooser", "no_model")))

    node.pause()
    assert node.report().address is None
    os.kill(report.agent_pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(report.pid, 0)


def test_a_server_has_the_time_to_drain_that_its_settings_give_it(
    root: Path, node: NodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "cotenant.toml").write_text("[server]\ndrain_s = 41.0\n")
    node.prepare(part("chooser"))
    limits_s: list[float] = []
    process = node._process
    assert process is not None
    wait = process.wait

    def waits(limit_s: float) -> int:
        limits_s.append(limit_s)
        return wait(limit_s)

    monkeypatch.setattr(process, "wait", waits)
    node.pause()
    assert limits_s == [41.0 + STOP_MARGIN_S]


def test_a_server_that_ended_is_told(node: NodeServer) -> None:
    node.prepare(part("chooser"))
    os.kill(node.report().pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while not (seen := node.report()).ended:
        assert seen.problem == "" or "does not answer" in seen.problem
        assert time.monotonic() < deadline
    assert "its server ended with status -9" in seen.problem


def test_a_server_that_cannot_start_says_why(node: NodeServer) -> None:
    one = part("chooser")
    with pytest.raises(ClusterError, match=r"the server did not start: .*partitions of 1 \+ 1 cores"):
        node.prepare(NodePlan(DevicePlan("core", one.plan.partitions * 2), CORE, one.loads, one.models))


class Stub(NodeServer):
    """A node whose server is this object: it takes the plan of its file at a signal, and answers when it likes."""

    def __init__(self, root: Path, plan: DevicePlan) -> None:
        super().__init__(root, [0], "127.0.0.1")
        self.plan = plan
        self.taken: list[DevicePlan] = []
        self.silent_for = 0
        """Probes that are not answered in time, once a signal has come."""
        self.deaf = False
        self.cores: tuple[int, ...] = (0,)
        self._process = cast(subprocess.Popen[bytes], self)
        self._address = Address("127.0.0.1", 1, 2)

    def send_signal(self, number: int) -> None:
        if number == signal.SIGHUP and not self.deaf:
            self.plan = open_plan(self._home / PLAN_FILE, 0, Cores(self.cores)).plan
            self.taken.append(self.plan)
        self._silent = self.silent_for

    _silent = 0
    pid = 7

    def poll(self) -> int | None:
        return 1 if self.deaf else None

    def wait(self, limit_s: float) -> int:
        return 0

    def _get(self, path: str, timeout_s: float) -> bytes:
        if self._silent:
            self._silent -= 1
            raise TimeoutError("timed out")
        if path == "/v2/models/stats":
            return b'{"model_stats": []}'
        return json.dumps({"version": 1, "digest": self.plan.digest}).encode()


@pytest.fixture
def stub(root: Path) -> Iterator[Stub]:
    made = Stub(root, part("chooser").plan)
    yield made
    made.deaf = True
    made.stop()


@pytest.mark.parametrize("silent_for", [0, 1, 5])
def test_a_server_that_is_slow_to_tell_its_plan_has_taken_it(stub: Stub, silent_for: int) -> None:
    first, second = part("chooser"), part("Owner of two", "chooser")
    stub.silent_for = silent_for
    stub.apply(second)
    assert stub.taken == [second.plan]
    assert stub.report().plan == second.plan.digest
    stub.apply(second)
    stub.apply(first)
    assert stub.taken == [second.plan, first.plan]
    assert stub.report().plan == first.plan.digest


def test_what_counts_is_what_the_server_runs_and_not_what_it_was_told(stub: Stub) -> None:
    first, second = part("chooser"), part("Owner of two", "chooser")
    stub.apply(second)
    stub.plan = first.plan  # whoever did that
    assert stub.report().plan == first.plan.digest
    stub.apply(second)
    assert stub.report().plan == second.plan.digest
    stub.deaf = True
    with pytest.raises(ClusterError, match="did not run its new plan"):
        stub.apply(first)
    stub.deaf = False
    stub.apply(second)
    stub.apply(first)
    assert stub.report().plan == first.plan.digest


def test_a_part_with_groups_is_taken(stub: Stub) -> None:
    """Every field of a slot comes to the server and back, as a digest."""
    plain = part("chooser", "Owner of two")
    slots = Slot("chooser", 2, 5.0, 1, 1), Slot("Owner of two", 1, 7.5, 1, 1), Slot("chooser", 1, 1.0)
    plan = DevicePlan("core", (PartitionPlan(2, 100_000_000, slots),))
    kind = DeviceType("core", ((2,), (1, 1)), 1 << 30)
    grouped = NodePlan(plan, kind, plain.loads, plain.models)
    stub.cores = (0, 1)
    stub.apply(grouped)
    assert stub.taken == [plan]
    assert stub.report().plan == plan.digest


def test_a_node_has_all_that_was_measured(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawned(*_: object, **__: object) -> None:
        raise StartError("not here")

    measured = [path_of(root) for path_of in MEASURED]
    for path in measured:
        path.parent.mkdir(exist_ok=True)
        if path.suffix:
            path.write_text(path.name)
        else:
            path.mkdir(exist_ok=True)
    monkeypatch.setattr("cotenant.cluster.node_server.spawn", spawned)
    node = NodeServer(root, [0], "127.0.0.1")
    try:
        with pytest.raises(ClusterError, match="not here"):
            node.prepare(part("chooser"))
        for path in measured:
            assert (node._models / path.relative_to(root)).resolve() == path.resolve()
    finally:
        node.stop()
    names = {path.name for path in measured}
    assert {"profile.json", "graphs", "groups.jsonl", "overlap.npz", "tasks.json", "together.toml"} <= names


def test_an_unload_that_fails_is_asked_for_again(stub: Stub) -> None:
    both, one = part("Owner of two", "chooser"), part("chooser")
    asked: list[str] = []
    fails = True

    def post(path: str, timeout_s: float) -> None:
        asked.append(path)
        if fails and path.endswith("/unload"):
            raise ClusterError("no")

    stub._post = post  # type: ignore[method-assign]
    stub.prepare(both)
    with pytest.raises(ClusterError):
        stub.release(one)
    fails = False
    stub.release(one)
    stub.release(one)
    assert [path for path in asked if path.endswith("/unload")] == ["/v2/repository/models/two/unload"] * 2
    stub.prepare(both)
    assert asked[-1] == "/v2/repository/models/two/load"


AGENT = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_cluster_node import NodeServer, part
node = NodeServer(Path(sys.argv[1]), [min(__import__("os").sched_getaffinity(0))], "127.0.0.1")
node.prepare(part("chooser"))
print(node.report().pid, flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_its_agent(root: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(root.parent)}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(root), *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert agent.stdout is not None
    assert agent.stdin is not None
    server = os.pidfd_open(int(json.loads(agent.stdout.readline())))
    agent.kill()
    agent.wait(WAIT_S)
    agent.stdout.close()
    agent.stdin.close()
    assert select.select([server], [], [], WAIT_S)[0], "the server has outlived its agent"
    os.close(server)
