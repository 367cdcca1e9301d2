"""The log of events and actions: what is written is read, replayed, and damage is named."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest

from bench._clockwork import Clockwork
from cotenant import trace
from cotenant.core.events import (
    DrainStarted,
    Event,
    LaunchEnded,
    PredictorChanged,
    QueryArrived,
    QueryCancelled,
    TenantAdded,
    TenantRemoved,
    TimerFired,
)
from cotenant.errors import InvalidValueError
from cotenant.policies import policy_class, policy_names
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.profiles.version_table import Implementation, UnitVersions, VersionTable
from cotenant.sim.driver import simulate
from cotenant.trace import Header, Record, TraceError, TraceWriter
from cotenant.trace.losses import losses_of
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share
from cotenant.world.simulated import TableWorld
from scenario import CORES, MS, ONE_LANE, tables
from strict_engine import StrictEngine as Engine

A, B = Tenant("a", 50 * MS, cuts=(0, 1, 2), weight=1.5), Tenant("b", 30 * MS, max_batch=3, priority=2)
GOLDEN = Path(__file__).parents[1] / "golden"
PREDICTOR = TablePredictor({"a": tables({"a": 20 * MS}, 2).tables["a"], "b": tables({"b": 5 * MS}).tables["b"]})
EVENTS: list[tuple[int, Event]] = [
    (0, QueryArrived(Query(0, "a", 0, 50 * MS))),
    (1, QueryArrived(Query(1, "b", 1, 30 * MS, items=2, expiry_ns=9 * MS))),
    (2, TenantRemoved("b", 'unloaded "by" Ölaf')),
    (3, TenantAdded(B)),
    (4, PredictorChanged(PREDICTOR.scaled({"a": 1.25}))),
    (5, QueryArrived(Query(2, "b", 5, 30 * MS))),
    (6, QueryCancelled(2)),
    (9 * MS, TimerFired()),
    (20 * MS, LaunchEnded(0, "out of memory")),
    (21 * MS, DrainStarted()),
]


def write(path: Path, limit_bytes: int | None = None) -> bytes:
    """Log all kinds of events."""
    policy = Edf(ONE_LANE)
    engine = Engine([A, B], policy, PREDICTOR, Machine.cpu(CORES))
    head = trace.header(policy, PREDICTOR, [A, B], Machine.cpu(CORES), created="2026-11-21", device="a test")
    log = TraceWriter(path.open("wb"), head, limit_bytes=limit_bytes)
    for now, event in EVENTS:
        log(now, event, engine.handle(event, now))
    log.close()
    return path.read_bytes()


def test_every_event_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "log")
    _, records = trace.read(tmp_path / "log")
    for (now, event), record in zip(EVENTS, records, strict=True):
        back = trace.decode_event(record.kind, record.event)
        assert record.time_ns == now
        if isinstance(event, PredictorChanged):
            assert isinstance(back, PredictorChanged)
            assert isinstance(back.predictor, TablePredictor)
            assert (back.predictor.tables, back.predictor.scales) == (PREDICTOR.tables, {"a": 1.25})
        else:
            assert back == event


def test_factors_by_shape_come_back_with_the_numbers_of_shapes(tmp_path: Path) -> None:
    scales = {"a": {0: 2.0, 3: 0.5}, "b": 1.5}
    policy, predictor = Edf(ONE_LANE), TablePredictor(PREDICTOR.tables, scales)
    head = trace.header(policy, predictor, [A, B], Machine.cpu(CORES), created="")
    log = TraceWriter((tmp_path / "log").open("wb"), head)
    event = PredictorChanged(predictor)
    log(5, event, Engine([A, B], policy, PREDICTOR, Machine.cpu(CORES)).handle(event, 5))
    log.close()
    read, records = trace.read(tmp_path / "log")
    assert read.scales == scales
    [record] = records
    back = trace.decode_event(record.kind, record.event)
    assert isinstance(back, PredictorChanged)
    assert isinstance(back.predictor, TablePredictor)
    assert back.predictor.scales == scales


def test_the_header_is_complete(tmp_path: Path) -> None:
    write(tmp_path / "log")
    head, _ = trace.read(tmp_path / "log")
    assert head == Header(
        trace.FORMAT,
        "2026-11-21",
        "edf",
        {
            "lanes": [{"cores": [0, 1], "device": "cpu", "first": 0}],
            "drop": "hopeless",
            "preempt": True,
            "slack_share": 0.1,
            "tail_aware": True,
            "widen": 1,
        },
        {"cpu": CORES},
        (A, B),
        PREDICTOR.tables,
        {},
        {"device": "a test"},
    )
    assert rebuild_policy(head.policy, head.policy_options) == Edf(ONE_LANE)


def test_versions_and_pressure_from_outside_come_back(tmp_path: Path) -> None:
    unit = UnitVersions((Implementation((1, 2), (9, 5), (7, 7)), Implementation((1,), (10,), (1,))), (0, 1))
    versions = VersionTable(2, 2, 10**9, (unit,))
    table = LatencyTable((LatencyRow(0, 1, 1, 9), LatencyRow(0, 1, 2, 5)), (1.0,), 1.0, versions)
    predictor = TablePredictor({"b": table}).with_beside(0.5)
    policy = Edf(ONE_LANE)
    head = trace.header(policy, predictor, [B], Machine.cpu(CORES), created="")
    log = TraceWriter((tmp_path / "log").open("wb"), head)
    log(0, PredictorChanged(predictor.with_beside(0.25)), [])
    log.close()
    back, records = trace.read(tmp_path / "log")
    assert (back.tables["b"], back.beside) == (table, 0.5)
    event = trace.decode_event(*next(iter((record.kind, record.event) for record in records)))
    assert isinstance(event, PredictorChanged)
    assert isinstance(event.predictor, TablePredictor)
    assert (event.predictor.tables, event.predictor.beside) == ({"b": table}, 0.25)
    assert len([*trace.replay(back, trace.read(tmp_path / "log")[1], rebuild_policy)]) == 1


def test_a_replay_writes_the_same_lines(tmp_path: Path) -> None:
    written = write(tmp_path / "log")
    head, records = trace.read(tmp_path / "log")
    assert [line for _, line in trace.replay(head, records, rebuild_policy)] == written.splitlines()[1:]


def test_a_trace_with_the_old_names_of_expansions_is_read(tmp_path: Path) -> None:
    golden = (GOLDEN / "tasks-expanding.jsonl").read_bytes()
    old = golden.replace(b'"Expand"', b'"Grow"').replace(b'"LaunchExpanded"', b'"LaunchGrew"')
    assert old.count(b'"Grow"') == golden.count(b'"Expand"') > 0
    (tmp_path / "old").write_bytes(old)
    assert list(trace.read(tmp_path / "old")[1]) == list(trace.read(GOLDEN / "tasks-expanding.jsonl")[1])


def test_a_trace_with_the_old_names_of_options_is_read_and_replayed(tmp_path: Path) -> None:
    golden = (GOLDEN / "policy-changed.jsonl").read_bytes()
    old = golden.replace(b'"tail_aware":', b'"cautious":').replace(b'"slack_share":', b'"stretch":')
    assert old.count(b'"stretch":') > 1
    (tmp_path / "old").write_bytes(old)
    assert policy_class(Clockwork.name) is Clockwork  # its module registers it
    head, records = trace.read(tmp_path / "old")
    assert head == trace.read(GOLDEN / "policy-changed.jsonl")[0]
    lines = [line for _, line in trace.replay(head, records, rebuild_policy)]
    assert lines == golden.splitlines()[1:]


def test_a_replay_with_another_policy_shows_where_it_decides_otherwise(tmp_path: Path) -> None:
    write(tmp_path / "log")
    head, records = trace.read(tmp_path / "log")

    def other(name: str, options: dict[str, object]) -> Edf:
        return Edf(ONE_LANE, preempt=False)

    record, line = next(trace.replay(head, records, other))
    assert line != trace_line(record)


def test_a_log_with_other_words_for_the_same_decisions_is_the_same(tmp_path: Path) -> None:
    """As one of a version that began each reason with the outcome."""
    write(tmp_path / "log")
    head, records = trace.read(tmp_path / "log")
    reasons = 0
    for record, line in trace.replay(head, records, rebuild_policy):
        assert trace.same_decisions(record, line)
        for kind, action in record.actions:
            if kind == "Respond":
                action["reason"] = f"{action['outcome']}: {action['reason']}"
                reasons += 1
        assert trace.same_decisions(record, line)
        for kind, action in record.actions:
            if kind == "Respond":
                action["outcome"] = "another"
                assert not trace.same_decisions(record, line)
    assert reasons


def trace_line(record: Record) -> bytes:
    return msgspec.json.encode((record.time_ns, record.kind, record.event, record.actions))


def test_a_last_line_cut_short_ends_the_records(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(write(path)[:-7])
    _, records = trace.read(path)
    assert len(list(records)) == len(EVENTS) - 1


def test_the_limit_stops_the_log_with_a_last_line_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = len(write(path).splitlines())
    lines = write(path, limit_bytes=600).splitlines()
    assert 2 < len(lines) < whole
    assert lines[-1].split(b",")[1] == b'"LogFull"'
    head, records = trace.read(path)
    assert [line for _, line in trace.replay(head, records, rebuild_policy)] == lines[1:-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"log: line 1: is not a cotenant-trace/3 file"),
        (b"hello\n", r"log: line 1: is not a cotenant-trace/3 file"),
        (b'{"format": 1}\n', r"log: line 1: is not a cotenant-trace/3 file"),
    ],
    ids=["empty", "text", "field"],
)
def test_what_is_not_a_log_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        trace.read(path)


def test_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(write(path).replace(b"cotenant-trace/3", b"cotenant-trace/9", 1))
    with pytest.raises(TraceError, match="format is 'cotenant-trace/9', expected 'cotenant-trace/3'"):
        trace.read(path)


def test_a_damaged_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = write(path).splitlines()
    lines[3] = lines[3][:20]
    path.write_bytes(b"\n".join(lines) + b"\n")
    _, records = trace.read(path)
    with pytest.raises(TraceError, match="log: line 4 is not a record"):
        list(records)


def test_an_unknown_kind_and_a_missing_file_are_named(tmp_path: Path) -> None:
    for kind in ("Exploded", "Query", "__name__"):
        with pytest.raises(TraceError, match=f"unknown kind '{kind}'"):
            trace.decode_event(kind, {})
    with pytest.raises(TraceError, match="none: cannot be read"):
        trace.read(tmp_path / "none")


def test_an_event_whose_fields_are_wrong_is_named() -> None:
    with pytest.raises(TraceError, match="LaunchEnded"):
        trace.decode_event("LaunchEnded", {"launch": "x"})
    for event in ({}, {"predictor": "FlakyPredictor"}, {"predictor": {"tables": {}}}):
        with pytest.raises(TraceError, match="'PredictorChanged' has wrong fields"):
            trace.decode_event("PredictorChanged", event)


def test_lines_reach_the_file_on_flush_and_in_blocks() -> None:
    file = io.BytesIO()
    log = TraceWriter(file, trace.header(Edf(ONE_LANE), PREDICTOR, [A], Machine.cpu(CORES), created=""))
    assert file.getvalue().count(b"\n") == 1, "the header is there at once: a log without one cannot be read"
    log(1, TimerFired(), [])
    assert file.getvalue().count(b"\n") == 1
    log.flush()
    assert file.getvalue().count(b"\n") == 2
    while file.getvalue().count(b"\n") == 2:
        log(1, TimerFired(), [])
    assert file.getvalue().endswith(b'[1,"TimerFired",{},[]]\n')


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("gap", [0, 5], ids=["row", "gap"])
def test_the_trace_of_a_machine_of_two_devices_is_replayed(name: str, gap: int, tmp_path: Path) -> None:
    first = Share((0, 1))
    second = Share((0, 1), "other", 2 + gap)
    machine = Machine((first, second))
    lanes = (Share((0,)), Share((1,)), Share((0,), "other", second.first), Share((1,), "other", second.first))
    try:
        policy = policy_class(name)(lanes)
        engine = Engine([A, B], policy, PREDICTOR, machine)
    except InvalidValueError:  # its unions of lanes would be of both devices
        assert name not in ("edf", "shares", "fcfs", "sjf", "clockwork", "most", "fair", "weighted", "duty_cycle")
        return
    path = tmp_path / "two.jsonl"
    writer = trace.TraceWriter(path.open("wb"), trace.header(policy, PREDICTOR, (A, B), machine, created=""))
    queries = [Query(number, "ab"[number % 2], number * MS, number * MS + 500 * MS) for number in range(12)]
    simulate(engine, TableWorld(PREDICTOR), queries, lambda *_: None, log=writer)
    writer.close()
    head, records = trace.read(path)
    assert head.whole == machine
    replayed = [line for _, line in trace.replay(head, records, rebuild_policy)]
    assert replayed == path.read_bytes().splitlines()[1:]
    assert len(losses_of(*trace.read(path))[1]) == 0
    launches = [action for record in trace.read(path)[1] for kind, action in record.actions if kind == "Launch"]
    devices = {launch["share"]["device"] for launch in launches}
    assert name not in ("edf", "shares") or devices == {"cpu", "other"}
