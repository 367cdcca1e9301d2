"""Runs that other processes disturbed: the server tells their time, and every reader of the run says so."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cotenant import linux
from cotenant.cli import status_of
from cotenant.cli.app import app
from cotenant.core.engine import Engine
from cotenant.core.events import LaunchEnded, PredictorChanged, QueryArrived, TenantAdded
from cotenant.load import LoadResult, run_load
from cotenant.measure import busy
from cotenant.measure.busy import (
    LOAD_PROCESS,
    MOST_OTHERS_OF_RUN,
    CoreTime,
    OthersClock,
    disturbed_sentence,
    others_share,
)
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import rebuild_policy
from cotenant.serve import recorder as recorder_module
from cotenant.serve.metrics_page import _of_processes
from cotenant.serve.recorder import Recorder
from cotenant.trace import OthersTook, missing_events, read, replay, same_decisions
from cotenant.trace import others_share as share_of
from cotenant.types import Query, Tenant
from cotenant.work import Machine
from cotenant.workload import TenantLoad, Trace, Workload
from load_fakes import in_loop, ok, serving
from scenario import CORES, MS, ONE_LANE, tables

BANNER = "Disturbed run: other processes took 23 % of the cores, so the figures are too pessimistic."
LINUX = pytest.mark.skipif(not linux.IS_LINUX, reason="needs /proc")


class Kernel:
    """Times of a machine with two cores: busy time, that of the server (process 1), and those of load generators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.busy_s = self.server_s = 0.0
        self.generators: dict[int, float] = {}
        monkeypatch.setattr(busy, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(linux, "busy_s", lambda cores: self.busy_s)
        monkeypatch.setattr(linux, "family_cpu_s", self._family)
        monkeypatch.setattr(
            linux, "processes_named", lambda name: list(self.generators) if name == LOAD_PROCESS else []
        )
        monkeypatch.setattr(linux, "processes_below", lambda pid: [(9, "")])  # one that the server itself started
        monkeypatch.setattr(linux, "cpu_s", self.generators.__getitem__)

    def _family(self, pid: int) -> float:
        assert pid == 1
        return self.server_s


def test_the_server_and_load_generators_are_no_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    kernel.busy_s, kernel.server_s = 1000.0, 300.0
    kernel.generators[9] = 250.0
    clock = OthersClock(lambda: 1, (0, 1))
    before = clock.read()
    kernel.now_s, kernel.busy_s, kernel.server_s, kernel.generators[7] = 10.0, 1016.0, 308.0, 3.0
    kernel.generators[9] = 257.0
    after = clock.read()
    assert others_share(before, after) == pytest.approx(5.0 / 20.0)
    kernel.now_s, kernel.busy_s, kernel.generators[7] = 10.9, 1017.8, 3.5
    assert clock.read() == after  # too soon
    kernel.now_s, kernel.busy_s, kernel.server_s = 14.0, 1020.0, 311.5
    del kernel.generators[7]  # what it used since the last reading is not known
    assert others_share(after, clock.read()) == pytest.approx(0.5 / 8.0)
    kernel.now_s, kernel.server_s = 16.0, 315.0  # ticks of the cores lag behind
    last = clock.read()
    kernel.now_s = 18.0
    assert clock.read().others_s == last.others_s


@pytest.mark.parametrize(("share", "says"), [(None, []), (0.0, []), (MOST_OTHERS_OF_RUN, []), (0.2349, [BANNER])])
def test_more_than_a_twentieth_is_a_disturbance(share: float | None, says: list[str]) -> None:
    assert disturbed_sentence(share) == says


def test_no_time_between_two_readings_tells_nothing() -> None:
    assert others_share(CoreTime(5.0, 1.0), CoreTime(5.0, 1.0)) is None
    assert others_share(CoreTime(5.0, 1.0), CoreTime(6.0, 9.0)) == 1.0


@LINUX
def test_a_named_process_is_found_and_its_time_stays_that_of_its_family() -> None:
    code = f"from cotenant import linux; linux.name_process({LOAD_PROCESS!r}); print(flush=True); input(); "
    code += "import time\nwhile time.process_time() < 0.3: pass"
    before = linux.family_cpu_s(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in linux.processes_named(LOAD_PROCESS)
        child.communicate(b"\n")
    assert child.pid not in linux.processes_named(LOAD_PROCESS)
    assert linux.family_cpu_s(os.getpid()) - before >= 0.25


def load_of(seconds: float) -> Workload:
    tenant = TenantLoad("m", "m", Trace((0, MS)), slo_ns=20_000 * MS)
    return Workload((tenant,), duration_ns=round(seconds * 1e9))


@pytest.mark.parametrize(("seconds", "says"), [(1.0, [BANNER]), (0.5, [])])
@in_loop
async def test_a_disturbed_load_says_so(seconds: float, says: list[str]) -> None:
    pages = iter([CoreTime(1e6, 5.0), CoreTime(1e6 + 100.0, 28.0)])

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=page_of(next(pages)))

    async with serving(ok, metrics=metrics) as server:
        result = await run_load(load_of(seconds), http_url=server.http_url)
    assert [each for each in result.warnings if each.startswith("Disturbed")] == says
    assert LoadResult.from_json(json.loads(json.dumps(result.to_json()))).others_share == result.others_share


@pytest.mark.parametrize("status", [200, 404, 500])
@in_loop
async def test_a_server_that_does_not_tell_its_time_disturbs_nothing(status: int) -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=b"cotenant_core_seconds_total x\n", status=status)

    async with serving(ok, metrics=metrics) as server:
        result = await run_load(load_of(1.0), http_url=server.http_url)
    assert result.others_share is None
    assert not any(each.startswith("Disturbed") for each in result.warnings)


def page_of(time: CoreTime) -> bytes:
    """What the metrics page says of a clock that stands there."""

    class Page(Collector):
        def collect(self) -> Iterator[Metric]:
            return _of_processes(SimpleNamespace(seconds=dict, others=SimpleNamespace(read=lambda: time)))  # type: ignore[arg-type]

    registry = CollectorRegistry()
    registry.register(Page())
    return generate_latest(registry)


def test_a_recorded_run_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first reading is of an unknown time, and the fourth one comes after a pause: both are left out."""
    path = tmp_path / "t.jsonl"
    times = itertools.chain([100.0, 102.5, 105.0, 200.0, 202.5], itertools.repeat(202.6))
    readings = iter(
        [CoreTime(7.0, 7.0), CoreTime(12.0, 8.0), CoreTime(17.0, 9.3), CoreTime(207.0, 190.0), CoreTime(212.0, 191.15)]
    )
    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(monotonic=times.__next__))
    monkeypatch.setattr(recorder_module, "_ENCODED_AT_ONCE", 1)
    recorder = Recorder(path, Edf(ONE_LANE), Machine.cpu(CORES), core_time=readings.__next__)
    record(recorder)
    recorder.close()
    took = [OthersTook(**each.event) for each in read(path)[1] if each.kind == "OthersTook"]
    assert [(each.cores_ns, each.others_ns) for each in took] == [
        (5_000 * MS, 1_000 * MS),
        (5_000 * MS, 1_300 * MS),
        (5_000 * MS, 1_150 * MS),
    ]
    assert share_of(path) == pytest.approx(3.45 / 15)
    assert missing_events(path) == 0
    played = list(replay(*read(path), rebuild_policy))
    assert len(played) == 5
    assert all(same_decisions(each, line) for each, line in played)
    assert status_of(lambda: app(["explain", "--lost", str(path)])) == 0
    assert capsys.readouterr().out.splitlines()[0] == BANNER
    assert status_of(lambda: app(["explain", "--lost", str(path), "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["others_share"] == pytest.approx(0.23)


def record(observer: Callable[..., None]) -> None:
    """Five events of an engine: latencies, a tenant, two queries, and the end of the first one's launch."""
    engine = Engine((), Edf(ONE_LANE), tables({"quick": 10 * MS}), Machine.cpu(CORES))
    events: list[Any] = [PredictorChanged(tables({"quick": 10 * MS})), TenantAdded(Tenant("quick", 40 * MS))]
    events += [QueryArrived(Query(number, "quick", number, number + 40 * MS)) for number in range(2)]
    events.append(LaunchEnded(0, None))
    for at, event in enumerate(events):
        observer(at, event, engine.handle(event, at), None)
