"""A real cluster of two nodes on the loopback address: a node is killed under load, and the other one takes over."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench._server import family
from cotenant.load import LiveStats, LoadResult, run_load
from cotenant.types import ANSWERS, Outcome
from cotenant.wire.client import infer_once
from cotenant.wire.encode import ClientError
from cotenant.workload import TenantLoad, Uniform, Workload
from profile_files import write_profile
from repositories import SLO_MS, write_good

MODELS = {"two": ("Owner of two", 4), "add_sub": ("add_sub", 8), "chooser": ("chooser", 1)}
"""Tenant and largest batch by model."""
RATE = 20.0
PERIOD_S = 3.0
BEFORE_S, CALM_S = 3.0, 3.0
"""Load before the kill, and after the two periods in which the cluster has to recover."""
START_S = 60.0
INPUTS = {
    "two": [{"x": np.ones((1, 8), np.float32)}],
    "add_sub": [{"a": np.ones((1, 4), np.int32), "b": np.ones((1, 4), np.int32)}],
    "chooser": [{"index": np.array([1])}],
}


class Cluster:
    """`cotenant cluster up` in a process of its own, ready when this returns."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        write_good(folder / "models", *MODELS)
        # Believed costs, so that the plan is the same on every machine: 1.2 cores of work, hence two nodes.
        costs = {
            model: {1: {rows: 10_000_000 * rows for rows in range(1, most + 1)}} for model, (_, most) in MODELS.items()
        }
        write_profile(folder / "costs.json", costs)
        tenants = ['[[device]]\nname = "core"\ncores = 1']
        for model, (tenant, _) in MODELS.items():
            tenants.append(f'[[tenant]]\nname = "{tenant}"\nmodel = "{model}"\nrate = 40.0\nslo_ms = {SLO_MS}')
        (folder / "tenants.toml").write_text("\n".join(tenants) + "\n")
        self.folder, self.costs = folder, ("--profiles", str(folder / "costs.json"))
        self.environment = {**os.environ, "TMPDIR": str(folder)}
        self.log = folder / "cluster.log"
        self._stderr = self.log.open("w", encoding="utf-8")
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "cotenant", "cluster", "up", str(folder / "tenants.toml")),
                *(str(folder / "models"), *self.costs, "--local-nodes", "2", "--json"),
                *("--http-port", "0", "--grpc-port", "0", "--planner", "elastic_int", "--headroom", "0"),
                *("--floor", "1", "--period", str(PERIOD_S), "--heartbeat", "0.25", *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=self.environment,
            text=True,
            process_group=0,
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            self.close()
            pytest.fail(f"the cluster did not start: {self.log.read_text(encoding='utf-8')[-3000:]}")
        self.ready: dict[str, Any] = json.loads(line)
        self.url = f"http://127.0.0.1:{self.ready['http_port']}"
        self.grpc = f"127.0.0.1:{self.ready['grpc_port']}"

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/v2/cotenant/cluster", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def wait_for(self, what: Any, limit_s: float = START_S) -> dict[str, Any]:
        """The first status of which `what` holds."""
        deadline = time.monotonic() + limit_s
        while not what(status := self.status()):
            assert time.monotonic() < deadline, (status, self.log.read_text(encoding="utf-8")[-3000:])
            time.sleep(0.05)
        return status

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cotenant", "cluster", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def close(self) -> None:
        """End everything, however the test went: processes of the cluster are in the sessions of their parents."""
        below = family(self.popen.pid)[1:]
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(START_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self._stderr.close()
        for pid in below:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.fail("the tests of clusters need Ray, which is not installed: pip install 'cotenant[cluster]'")
    # Ray has sockets below it, whose paths may not be long: those that pytest makes can be.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        try:
            yield made
        finally:
            made.close()


def send(cluster: Cluster, seconds: float, on_tick: Any) -> LoadResult:
    """Queries of all tenants at fixed times, one tenant over gRPC."""
    protocols = {"chooser": "grpc"}
    loads = tuple(
        TenantLoad(tenant, model, Uniform(RATE), protocol=protocols.get(model, "http"))
        for model, (tenant, _) in MODELS.items()
    )
    workload = Workload(loads, round(seconds * 1e9), seed=1)
    return asyncio.run(
        run_load(workload, http_url=cluster.url, grpc_url=cluster.grpc, inputs=INPUTS, on_tick=on_tick, tick_s=0.05)
    )


@pytest.mark.alone
def test_a_killed_node_is_planned_around_and_no_query_is_without_an_outcome(cluster: Cluster) -> None:
    before = cluster.wait_for(lambda found: all(node["agent_pid"] and node["pid"] for node in found["nodes"]))
    assert [node["state"] for node in before["nodes"]] == ["serving", "serving"]
    assert before["share"] == 1.0
    victim = before["nodes"][0]
    shown = cluster.command("status")
    assert shown.returncode == 0, shown.stderr
    assert all(node["node"] in shown.stdout for node in before["nodes"])
    assert infer_once(cluster.url, "two", INPUTS["two"][0])["y"].tolist() == [[1.0] * 8]  # twice Softsign of 1
    killed_ns: list[int] = []

    def kill(stats: LiveStats) -> None:
        if not killed_ns and stats.elapsed_ns >= BEFORE_S * 1e9:
            os.kill(victim["agent_pid"], signal.SIGKILL)
            os.kill(victim["pid"], signal.SIGKILL)
            killed_ns.append(stats.elapsed_ns)

    result = send(cluster, BEFORE_S + 2 * PERIOD_S + CALM_S, kill)
    records = list(result.records)
    recovered_ns = killed_ns[0] + round(2 * PERIOD_S * 1e9)
    expected = round(RATE * (BEFORE_S + 2 * PERIOD_S + CALM_S))
    for tenant, _ in MODELS.values():
        own = [record for record in records if record.tenant == tenant]
        assert abs(len(own) - expected) <= 1  # each query that was sent has one record
        calm = [r for r in own if r.ended_ns < killed_ns[0] or r.scheduled_ns >= recovered_ns]
        assert calm
        assert all(record.outcome in ANSWERS for record in calm), (tenant, cluster.log.read_text()[-3000:])
    lost = [record for record in records if record.outcome not in ANSWERS]
    assert all(record.outcome in (Outcome.REJECTED, Outcome.FAILED) for record in lost)
    said = [reason for tenant in result.tenants for told in tenant.reasons.values() for reason in told]
    assert all("no node serves" in reason or "the node was lost" in reason for reason in said), said

    sent = {tenant: sum(record.tenant == tenant for record in records) for tenant, _ in MODELS.values()}
    sent["Owner of two"] += 1
    after = cluster.wait_for(lambda found: sum(t["queries"]["offered"] for t in found["tenants"]) == sum(sent.values()))
    for tenant in after["tenants"]:
        counts = tenant["queries"]
        ended = sum(counts[outcome] for outcome in ("in_time", "late", "refused", "failed", "cancelled"))
        assert ended == counts["offered"] == sent[tenant["tenant"]]
        assert counts["cancelled"] == 0
    reasons = [change["reason"] for change in after["changes"]]
    assert reasons[:2] == ["the first plan", "nodes were lost"]
    assert after["changes"][1]["nodes"] == 1
    assert after["changes"][1]["share"] < 1.0  # 1.2 cores of believed work do not fit onto one

    # Its machine is still there, so that a new agent takes the node's place, and the plan is whole again.
    whole = cluster.wait_for(lambda found: found["share"] == 1.0)
    assert sorted(node["state"] for node in whole["nodes"]) == ["serving", "serving"]
    assert infer_once(cluster.url, "add_sub", INPUTS["add_sub"][0])["sum"].tolist() == [[2] * 4]

    # A gateway that dies is replaced at the same ports.
    [gateway] = [pid for pid in family(cluster.popen.pid)[1:] if title(pid).startswith("ray::Gateway")]
    os.kill(gateway, signal.SIGKILL)
    assert retried(lambda: infer_once(cluster.url, "chooser", INPUTS["chooser"][0]))["y"].tolist() == [[2.0, 3.0]]
    assert retried(cluster.status)["share"] == 1.0

    again = cluster.command("up", str(cluster.folder / "tenants.toml"), str(cluster.folder / "models"), *cluster.costs)
    assert (again.returncode, again.stdout) == (2, "")
    assert "a cluster of this user already runs on this machine" in again.stderr
    assert cluster.command("status").returncode == 0

    below = [os.pidfd_open(pid) for pid in family(cluster.popen.pid)[1:]]
    assert len(below) > 6
    stopped = cluster.command("down")
    assert (stopped.returncode, stopped.stdout) == (0, "The cluster is down.\n"), stopped.stderr
    assert cluster.popen.wait(START_S) == 0
    for process in below:
        assert select.select([process], [], [], START_S)[0], "a process has outlived its cluster"
        os.close(process)
    none = cluster.command("status")
    assert (none.returncode, none.stdout) == (2, "")
    assert "no cluster of this user runs" in none.stderr
    assert list(cluster.folder.glob("cotenant-*")) == [], "folders were left behind"


@pytest.mark.alone
def test_the_death_of_ray_s_head_ends_a_cluster_with_one_sentence(cluster: Cluster) -> None:
    children = family(cluster.popen.pid)[1:]
    [head] = [pid for pid in children if "/gcs/gcs_server" in title(pid)]
    below = [os.pidfd_open(pid) for pid in children]
    os.kill(head, signal.SIGKILL)
    assert cluster.popen.wait(START_S) == 2
    for process in below:
        assert select.select([process], [], [], START_S)[0], "a process has outlived its cluster"
        os.close(process)
    said = [line for line in cluster.log.read_text(encoding="utf-8").splitlines() if line.startswith("cotenant:")]
    assert len(said) == 1
    assert "the head of Ray has ended" in said[0]
    assert list(cluster.folder.glob("cotenant-*")) == []


def title(pid: int) -> str:
    """What a process calls itself; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def retried(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The first answer, of a gateway that comes back."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            if found := ask():
                return found
        except (OSError, ClientError):
            assert time.monotonic() < deadline
            time.sleep(0.05)
