"""Traces of earlier versions: fields and causes of lost queries under their old names are read as the current ones."""

from __future__ import annotations

from pathlib import Path

from cotenant import trace
from cotenant.core.actions import Respond
from cotenant.core.events import Event, LaunchEnded, QueryArrived, QueryRefused
from cotenant.policies.ordered.edf import Edf
from cotenant.trace import TraceWriter, decode_event
from cotenant.types import LossCause, Outcome, Query, Tenant
from cotenant.work import Machine, TaskTime
from scenario import CORES, MS, ONE_LANE, tables
from strict_engine import StrictEngine as Engine

TENANT = Tenant("a", 50 * MS)
PREDICTOR = tables({"a": 20 * MS})
EVENTS: list[tuple[int, Event]] = [
    (0, QueryArrived(Query(0, "a", 0, 50 * MS))),
    (1, QueryArrived(Query(1, "a", 1, 50 * MS))),
    (2, QueryRefused("a", 1, LossCause.FRONT_END, "no room")),
    (20 * MS, LaunchEnded(0, None, (TaskTime((0,), 1, 0, 5),), 7)),
]
RENAMED = {
    b'"steal_ns":7': b'"stolen_ns":7',
    b'"task_times":[[': b'"pieces":[[',
    b'"cause":"front_end"': b'"cause":"door"',
    b'"cause":"steal_time"': b'"cause":"stolen"',
    b'"culprit":"b"': b'"whom":"b"',
}


def test_old_names_are_read_as_the_current_ones(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    policy = Edf(ONE_LANE)
    engine = Engine([TENANT], policy, PREDICTOR, Machine.cpu(CORES))
    log = TraceWriter(new.open("wb"), trace.header(policy, PREDICTOR, [TENANT], Machine.cpu(CORES), created=""))
    for now, event in EVENTS:
        log(now, event, engine.handle(event, now))
    lost = Respond(1, Outcome.DROPPED, "", LossCause.STEAL_TIME, "b")
    log(21 * MS, QueryRefused("a", 1, LossCause.SLO, ""), [lost])
    log.close()
    content = new.read_bytes()
    for current, before in RENAMED.items():
        assert current in content
        content = content.replace(current, before)
    old.write_bytes(content)
    records = list(trace.read(old)[1])
    assert records == list(trace.read(new)[1])
    assert decode_event(records[3].kind, records[3].event) == EVENTS[3][1]
