"""A trace whose file stalls: queries are answered meanwhile, what is lost is counted exactly, and readers say it."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant import shortages
from cotenant.cli import status_of
from cotenant.cli.app import app
from cotenant.core.engine import Engine
from cotenant.core.events import DrainStarted, LaunchEnded, TenantAdded, TenantRemoved
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import rebuild_policy
from cotenant.report.timeline import write_timeline
from cotenant.serve import recorder as module
from cotenant.serve.engine.clock import VirtualClock
from cotenant.serve.engine.driver import Driver, Observer
from cotenant.serve.recorder import Recorder
from cotenant.shortages import Resource
from cotenant.trace import EventsMissing, TraceError, TraceWriter, header, missing_events, read, replay, same_decisions
from cotenant.trace.bound import bound_of
from cotenant.trace.explain import explain
from cotenant.trace.losses import losses_of
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine
from cotenant.world.simulated import SimulatedExecutor, TableWorld
from scenario import CORES, MS, ONE_LANE, tables

WAIT_S = 10.0
QUICK = Tenant("quick", 40 * MS)
LATENCY = tables({"quick": 10 * MS})
MACHINE = Machine.cpu(CORES)


class Gate:
    """A file that waits at each write while the gate is closed."""

    def __init__(self, file: Any) -> None:
        self._file, self.open, self.reached = file, threading.Event(), threading.Event()
        self.open.set()

    def write(self, data: bytes) -> int:
        self.reached.set()
        assert self.open.wait(WAIT_S)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def record_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Recorder]:
    """Makes a recorder in `tmp_path` with a file of the test's own."""

    def make(file: Any, **limits: int) -> Recorder:
        real = Path.open

        def opened(self: Path, mode: str = "r", *a: Any, **k: Any) -> Any:
            return file if mode == "wb" else real(self, mode, *a, **k)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", opened)
            (tmp_path / "t.jsonl.new").touch()
            return Recorder(tmp_path / "t.jsonl", Edf(ONE_LANE), MACHINE, **limits)

    return make


def query(number: int, now_ns: int) -> Query:
    return Query(number, "quick", now_ns, now_ns + 40 * MS)


def lost() -> int:
    return shortages.counts()[Resource.DISK]


def serve(recorder: Observer, queries: int) -> Callable[[int], list[Outcome]]:
    """A server in virtual time; the result serves so many queries more, one after another."""
    clock = VirtualClock()
    engine = Engine((), Edf(ONE_LANE), LATENCY, MACHINE)
    driver = Driver(engine, SimulatedExecutor(TableWorld(LATENCY), clock), clock, (recorder,))
    driver.post(TenantAdded(QUICK))

    def go(number: int) -> list[Outcome]:
        ended: list[Outcome] = []
        for _ in range(number):
            driver.submit(query, {"x": np.zeros(1, np.float32)}, lambda respond, _: ended.append(respond.outcome))
            clock.run()
        return ended

    go(queries)
    return go


def test_queries_are_answered_while_a_pipe_is_full(record_in: Callable[..., Recorder], tmp_path: Path) -> None:
    theirs, ours = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 4096)
    before = lost()
    recorder = record_in(os.fdopen(ours, "wb"), most_events=100)
    assert serve(recorder, 1000)(1) == [Outcome.ANSWERED]
    path = tmp_path / "read.jsonl"
    reader = threading.Thread(target=lambda: path.write_bytes(os.fdopen(theirs, "rb").read()))
    reader.start()
    recorder.close()
    reader.join(WAIT_S)
    written = sum(record.kind != "EventsMissing" for record in read(path)[1])
    assert 0 < missing_events(path) == lost() - before == 1 + 2 * 1001 - written


def test_readers_say_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second and the third query arrive, and the first one of them ends, where events are missing."""
    records: list[Any] = []
    serve(lambda *each: records.append(each[:3]), 5)
    path = tmp_path / "t.jsonl"
    head = header(Edf(ONE_LANE), LATENCY, (), MACHINE, created="")
    writer = TraceWriter(path.open("wb"), head)
    writer.write([*records[:4], (records[4][0], EventsMissing(3), []), *records[7:]])
    writer.close()
    assert missing_events(path) == 3
    kinds = [record.kind for record in read(path)[1]]
    assert kinds == ["TenantAdded", *["QueryArrived", "LaunchEnded"], "QueryArrived", "EventsMissing",
                     *["QueryArrived", "LaunchEnded"] * 2]  # fmt: skip
    played = list(replay(*read(path), rebuild_policy))
    assert len(played) == 4
    assert all(same_decisions(record, line) for record, line in played)
    assert explain(read(path)[1], 0).outcome == Outcome.ANSWERED
    last = explain(read(path)[1], 3)
    assert "3 events before it are missing in the trace" in "\n".join(last.sentences())
    for number, why in [
        (1, "had not ended where 3 events are missing"),
        (2, "not in this trace; 3 events are missing"),
    ]:
        with pytest.raises(TraceError, match=why):
            explain(read(path)[1], number)
    assert losses_of(*read(path))[1] == []
    bound = bound_of(*read(path))
    assert bound.in_time == bound.tenants[0].offered == 3
    assert write_timeline(tmp_path / "timeline.json", read(path)[1]) == 3
    assert "3 events are missing" in (tmp_path / "timeline.json").read_text("utf-8")
    for command in (["explain", "--lost"], ["bound"], ["replay"]):
        assert status_of(lambda command=command: app([*command, str(path)])) == 0
        assert "3 events are missing" in capsys.readouterr().out
        assert status_of(lambda command=command: app([*command, str(path), "--json"])) == 0
        assert json.loads(capsys.readouterr().out)["missing_events"] == 3


def test_a_close_does_not_wait_for_a_file_that_hangs(
    record_in: Callable[..., Recorder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    gate = Gate((tmp_path / "file").open("wb"))
    before = lost()
    recorder = record_in(gate)
    gate.open.clear()
    gate.reached.clear()
    for time_ns in range(500):
        recorder(time_ns, DrainStarted(), [], None)
    assert gate.reached.wait(WAIT_S)
    recorder.close()
    recorder.close()
    assert lost() - before == 500
    assert "the last 500 events are not recorded" in caplog.text
    recorder(500, DrainStarted(), [], None)
    assert lost() - before == 501
    gate.open.set()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 90), st.booleans(), st.sampled_from([0, 0, 5])), min_size=1, max_size=12),
    most_events=st.integers(1, 70),
    most_bytes=st.sampled_from([1, 3000, 1 << 20]),
)
def test_each_event_is_written_in_order_or_counted(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, bool, int]],
    most_events: int,
    most_bytes: int,
) -> None:
    """The time of an event is its number, so that each gap says which are missing."""
    folder = tmp_path_factory.mktemp("trace")
    path, tenants = folder / "t.jsonl", set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FLUSH_S", 0.0)
        recorder = Recorder(path, Edf(ONE_LANE), MACHINE, most_events=most_events, most_bytes=most_bytes)
        gate = Gate(recorder._writer._file)
        recorder._writer._file = gate  # type: ignore[assignment]
        before, number = lost(), 0
        for events, is_open, pieces in steps:
            (gate.open.set if is_open else gate.open.clear)()
            for _ in range(events):
                recorder(number, LaunchEnded(number, task_times=((),) * pieces), [], None)  # type: ignore[arg-type]
                number += 1
            recorder(number, TenantRemoved("a", "gone"), [], None)
            tenants.add(number)
            number += 1
        gate.open.set()
        recorder.close()
    told, missing = 0, 0
    lines = path.read_bytes().splitlines()[1:]
    for time_ns, kind, event, _ in map(json.loads, lines):
        assert time_ns == told
        gap = event["events"] if kind == "EventsMissing" else 0
        assert gap or kind != "EventsMissing"
        tenants.discard(time_ns)
        told += gap or 1
        missing += gap
    assert told == number
    assert missing == lost() - before == missing_events(path)
    assert not tenants, "events of tenants are kept"
