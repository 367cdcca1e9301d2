"""The timeline of a trace: every launch on its lane, every query on its tenant's track, and who waited when."""

from __future__ import annotations

import json
from pathlib import Path

from cotenant.core.snapshot import DropRule
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.report.timeline import write_timeline
from cotenant.sim.driver import simulate
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.trace import TraceWriter, header, read
from cotenant.types import Query, Tenant
from cotenant.work import Machine
from cotenant.world.simulated import TableWorld
from scenario import CORES, MS, ONE_LANE, TWO_LANES, tables
from strict_engine import StrictEngine as Engine

A, B = Tenant("a", 100 * MS, cuts=(0, 1, 2)), Tenant("b", 30 * MS)
BELIEF = TablePredictor({**tables({"a": 40 * MS}, 2).tables, **tables({"b": 10 * MS}).tables})


def test_a_timeline_shows_every_launch_and_every_query(tmp_path: Path) -> None:
    path, out = tmp_path / "trace", tmp_path / "out.json"
    policy = Edf(TWO_LANES, DropRule.EXPIRED, preempt=True, slack_share=0.0)
    writer = TraceWriter(path.open("wb"), header(policy, BELIEF, (A, B), Machine.cpu(CORES), created=""))
    start = 5 * MS  # the first event is the origin of the timeline
    queries = [Query(0, "a", start, start + A.slo_ns), Query(1, "a", start, start + A.slo_ns)]
    queries += [Query(number, "b", start + MS, start + 31 * MS) for number in (2, 3)]
    queries += [Query(4, "b", start + 2 * MS, start + 3 * MS)]
    simulate(
        Engine((A, B), policy, BELIEF, Machine.cpu(CORES)), TableWorld(BELIEF), queries, lambda *_: None, log=writer
    )
    writer.close()
    launches = write_timeline(out, read(path)[1])
    records = list(read(path)[1])
    assert launches == sum(kind == "Launch" for record in records for kind, _ in record.actions) >= 5
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {"cores 0", "cores 1", "a", "b"} <= names
    spans = [event for event in events if event["ph"] == "X"]
    short = sorted((span["ts"], span["dur"], span["args"]["queries"]) for span in spans if span["name"] == "b")
    assert short == [(20_000, 10_000, "2"), (20_000, 10_000, "3")]  # microseconds after the first event
    assert sum(span["dur"] for span in spans if span["name"] == "a") == 80_000
    text = out.read_text(encoding="utf-8")
    for ended in ("answered #0", "answered #1", "answered #2", "answered #3", "dropped #4"):
        assert ended in text
    waits = [event["args"] for event in events if event["ph"] == "C"]
    assert max(wait.get("b", 0) for wait in waits) == 3
    assert waits[-1] == {"a": 0, "b": 0}


def test_the_tasks_of_a_placed_launch_have_tracks_of_their_cores(tmp_path: Path) -> None:
    path, out = tmp_path / "trace", tmp_path / "out.json"
    policy = Edf(ONE_LANE, preempt=False, slack_share=0.0)
    writer = TraceWriter(path.open("wb"), header(policy, BELIEF, (B,), Machine.cpu(CORES), created=""))
    queries = [Query(0, "b", 5 * MS, 35 * MS)]
    simulate(Engine((B,), policy, BELIEF, Machine.cpu(CORES)), TableWorld(BELIEF), queries, lambda *_: None, log=writer)
    writer.close()
    pieces = [[[0, 1], 3, 0, MS], [[1], 2, MS, 4 * MS]]
    ended = '"error":null'
    path.write_text(path.read_text().replace(ended, f'{ended},"task_times":{json.dumps(pieces)}'))
    assert write_timeline(out, read(path)[1]) == 1
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [
        (tracks[event["tid"]], event["ts"], event["dur"], event["args"]["units"])
        for event in events
        if event["ph"] == "X" and tracks[event["tid"]] in ("core 0", "core 1")
    ]
    assert sorted(spans) == [("core 0", 0, 1000, 3), ("core 1", 0, 1000, 3), ("core 1", 1000, 3000, 2)]


def test_a_launch_says_when_it_was_enqueued(tmp_path: Path) -> None:
    path, out = tmp_path / "trace", tmp_path / "out.json"
    policy = Overlap(TWO_LANES, preempt=False, enqueue_ms=1000.0)
    writer = TraceWriter(path.open("wb"), header(policy, BELIEF, (A, B), Machine.cpu(CORES), created=""))
    queries = [Query(number, "a", at, at + A.slo_ns) for number, at in enumerate((5 * MS, 8 * MS))]
    simulate(
        Engine((A, B), policy, BELIEF, Machine.cpu(CORES)), TableWorld(BELIEF), queries, lambda *_: None, log=writer
    )
    writer.close()
    assert write_timeline(out, read(path)[1]) == 2
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    told = {e["args"]["queries"]: (e["ts"], e["args"].get("enqueued_at_ms")) for e in events if "batch" in e["args"]}
    assert told == {"0": (0, None), "1": (40_000, 3.0)}


def test_an_empty_trace_gives_an_empty_timeline(tmp_path: Path) -> None:
    assert write_timeline(tmp_path / "out.json", []) == 0
    json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
