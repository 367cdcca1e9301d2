"""`cotenant serve --plan` as users run it: the load shifts, the plan follows, a new file comes, and nobody is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.repository import trace_path
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.file import PlanFile, Request, plan_text
from cotenant.techniques.partitions.plan.sources import costs_of_repository
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load, PartitionPlan, Plan, Slot
from cotenant.trace import read
from cotenant.wire.client import infer_once
from processes import WAIT_S, Process, cotenant, serving
from repositories import config, scaled, write_model

MS = 1_000_000
SLO_MS = 20_000
KIND = DeviceType("cpu", ((2,), (1, 1)), 1 << 40)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profiled repository of two tenants."""
    made = tmp_path_factory.mktemp("planned") / "models"
    for name, factor in (("a", 1.0), ("b", 2.0)):
        write_model(made, name, config(max_batch=4, slo_ms=SLO_MS), {1: lambda factor=factor: scaled(factor)})
    done = cotenant("profile", str(made), "--no-server", "--budget", "0.05", "--lanes", "0/1")
    assert done.returncode == 0, done.stderr
    return made


def request(rate_a: float, rate_b: float) -> Request:
    rates = {"a": rate_a, "b": rate_b}
    return Request(tuple(Load(name, name, rate, SLO_MS * MS) for name, rate in rates.items()), (KIND,))


def planned(root: Path, rate_a: float, rate_b: float) -> PlanFile:
    """What `cotenant plan` would write."""
    asked = request(rate_a, rate_b)
    basis = costs_of_repository(root, asked.devices)
    plan = Elastic(headroom=0.1).plan(asked.loads, basis.devices, basis.costs)
    assert isinstance(plan, Plan)
    return PlanFile(asked, plan, 0.1)


def get(process: Process, path: str) -> Any:
    with urllib.request.urlopen(process.url + path, timeout=WAIT_S) as answer:
        return json.loads(answer.read())


def until(condition: Callable[[], bool], between: threading.Event) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        between.wait(0.02)


class Clients:
    """Closed-loop clients of two tenants, whose numbers can be changed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._counting = threading.Lock()
        self.ends: Counter[str] = Counter()
        self.errors: list[str] = []

    def more(self, model: str, count: int, pause_s: float = 0.0) -> threading.Event:
        """Start clients; they stop when the event is set."""
        stop = threading.Event()
        for _ in range(count):
            thread = threading.Thread(target=self._run, args=(model, stop, pause_s), daemon=True)
            thread.start()
            self._threads.append(thread)
        return stop

    def _run(self, model: str, stop: threading.Event, pause_s: float) -> None:
        inputs = {"x": np.ones((1, 8), np.float32)}
        while not (stop.is_set() or self._stop.is_set()):
            try:
                infer_once(self._url, model, inputs)
                end = model
            except Exception as error:
                end = "failed"
                self.errors.append(str(error))
            with self._counting:
                self.ends[end] += 1
            stop.wait(pause_s)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)


@pytest.mark.alone
def test_the_load_shifts_the_plan_follows_and_every_query_has_one_outcome(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(planned(root, 2.0, 2.0)))
    (root / "cotenant.toml").write_text('[plan]\nperiod_s = 0.5\nplanner = "elastic"\n')
    never = threading.Event()
    with serving(root, "--plan", str(path), "--cores", "0,1") as process:
        assert process.ready["policy"] == "duty_cycle (drop: hopeless)"
        first = get(process, "/v2/cotenant/plan")
        assert (first["version"], first["share"]) == (1, 1.0)
        clients = Clients(process.url)
        try:
            few = clients.more("b", 1, pause_s=0.2)
            many = clients.more("a", 3)  # far more than was planned for
            until(lambda: _served(process)["a"] > 20.0, never)
            grown = get(process, "/v2/cotenant/plan")
            assert grown["version"] > 1
            many.set()
            few.set()
            clients.more("b", 3)
            clients.more("a", 1, pause_s=0.2)
            until(lambda: _served(process)["b"] > 20.0, never)  # the load has shifted
            shifted = get(process, "/v2/cotenant/plan")
            assert shifted["version"] > grown["version"]
            asked = request(2000.0, 2000.0)  # so large that no look finds it too small
            one = PartitionPlan(2, 40 * MS, tuple(Slot(name, 4, 2200.0) for name in "ab"))
            path.write_text(plan_text(PlanFile(asked, Plan((DevicePlan("cpu", (one,)),), "by hand"), 0.1)))
            process.popen.send_signal(signal.SIGHUP)
            until(lambda: any("was read again" in line["message"] for line in process.logs), never)
            before = clients.ends["a"]
            until(lambda: clients.ends["a"] > before + 5, never)
        finally:
            clients.end()
        last = get(process, "/v2/cotenant/plan")
        assert last["version"] > shifted["version"]
        assert last["attainment"] == {"a": 1.0, "b": 1.0}
        assert clients.errors == []
        assert process.end(signal.SIGTERM) == 0
        assert not [line for line in process.logs if line["level"] == "error"]
    _, records = read(trace_path(root))
    arrived, changed, ended = 0, 0, Counter[int]()
    outcomes: Counter[str] = Counter()
    for record in records:
        arrived += record.kind == "QueryArrived"
        changed += record.kind == "PolicyChanged"
        for kind, action in record.actions:
            if kind == "Respond":
                ended[action["query"]] += 1
                outcomes[action["outcome"]] += 1
    assert changed >= 3
    assert set(ended.values()) == {1}
    assert outcomes == {"answered": arrived} == {"answered": sum(clients.ends.values())}
    replayed = cotenant("replay", str(root), "--json")
    assert (replayed.returncode, json.loads(replayed.stdout)["same"]) == (0, True), replayed.stderr
    assert cotenant("explain", str(arrived - 1), str(root)).returncode == 0


def _served(process: Process) -> Counter[str]:
    """Rows a second that the present plan serves of each tenant."""
    served: Counter[str] = Counter()
    for partition in get(process, "/v2/cotenant/plan")["plan"]["partitions"]:
        for slot in partition["slots"]:
            served[slot["tenant"]] += slot["rate"]
    return served


def test_a_plan_that_does_not_fit_here_is_one_sentence(root: Path, tmp_path: Path) -> None:
    (root / "cotenant.toml").unlink(missing_ok=True)
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(planned(root, 2.0, 2.0)).replace("size = 1", "size = 2"))
    for arguments, sentence in (
        (("--plan", str(path), "--cores", "0"), "and there are 1"),
        (("--plan", str(path), "--device-number", "7"), "has no device number 7"),
        (("--plan", str(tmp_path / "none.toml")), "none.toml"),
        (("--plan", str(path), "--lanes", "all"), "makes the lanes"),
    ):
        ended = cotenant("serve", str(root), "--http-port", "0", "--grpc-port", "0", *arguments)
        assert ended.returncode == 2
        assert sentence in ended.stderr.splitlines()[-1]
        assert "Traceback" not in ended.stderr


def test_without_a_plan_the_endpoint_says_so(root: Path) -> None:
    with serving(root, "--no-trace") as process:
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(process, "/v2/cotenant/plan")
        assert caught.value.code == 404
        assert "runs no plan" in json.loads(caught.value.read())["error"]


def test_simulate_runs_the_same_plan(root: Path, tmp_path: Path) -> None:
    path, workload = tmp_path / "plan.toml", tmp_path / "workload.toml"
    path.write_text(plan_text(planned(root, 50.0, 50.0)))
    tenants = "".join(f'[[tenant]]\nmodel = "{name}"\narrivals = "poisson"\nrate = 50.0\n' for name in "ab")
    workload.write_text(f"duration_s = 2\n{tenants}")
    command = [sys.executable, "-m", "cotenant", "simulate", str(workload), str(root), "--plan", str(path), "--json"]
    trace = tmp_path / "trace.jsonl"
    done = subprocess.run(
        [*command, "--trace", str(trace)], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    [made] = json.loads(done.stdout)["runs"]
    assert made["policy"] == "duty_cycle"
    assert made["total"]["attainment"] == 1.0
    head, _ = read(trace)
    assert head.policy_options["rounds"][0]["slots"]
    replayed = cotenant("replay", str(trace), "--json")
    assert json.loads(replayed.stdout)["same"] is True


@pytest.mark.parametrize("command", ["serve", "simulate"])
def test_a_plan_of_a_tenant_without_a_model_is_refused_by_his_name(root: Path, tmp_path: Path, command: str) -> None:
    path, workload = tmp_path / "plan.toml", tmp_path / "workload.toml"
    path.write_text(plan_text(planned(root, 50.0, 50.0)).replace('"b"', '"nobody"'))
    workload.write_text('duration_s = 1\n[[tenant]]\nmodel = "a"\nrate = 5.0\n')
    places = [str(root)] if command == "serve" else [str(workload), str(root)]
    done = cotenant(command, *places, "--plan", str(path), "--cores", "0,1")
    assert done.returncode == 2
    assert f"{path}: tenant 'nobody' has no model in {root}, expected one of a, b" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
