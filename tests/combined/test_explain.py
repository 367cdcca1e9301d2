"""The story of a query, told from a small simulated trace whose every number can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cotenant.cli import main
from cotenant.core.events import (
    Event,
    LaunchEnded,
    PredictorChanged,
    QueryArrived,
    QueryCancelled,
    TenantChanged,
    TenantRemoved,
    TenantResumed,
)
from cotenant.core.predictor import Group
from cotenant.core.snapshot import DropRule, Policy
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.table import TablePredictor
from cotenant.sim.driver import simulate
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, Wait
from cotenant.techniques.granularity.policy.joint_schedule import JointSchedule
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.trace import TraceError, TraceWriter, header, read
from cotenant.trace.basis import GroupFits
from cotenant.trace.explain import QueryHistory, explain
from cotenant.types import Query, Tenant
from cotenant.wire.oip import QUERY_KEY
from cotenant.work import Machine, Round, Slot, TaskTime
from cotenant.world.simulated import TableWorld
from scenario import CORES, MS, ONE_LANE, TWO_LANES, tables
from strict_engine import StrictEngine as Engine

LONG = Tenant("long", 300 * MS, cuts=(0, 2, 4))
SHORT = Tenant("short", 50 * MS, max_batch=4, splits=((0, 1),))
BELIEF = TablePredictor({**tables({"long": 80 * MS}, 4).tables, **tables({"short": 10 * MS}, batch_slope=0.5).tables})


def record(
    path: Path, policy: Policy, queries: Sequence[Query], failing: bool = False, belief: TablePredictor = BELIEF
) -> None:
    head = header(policy, belief, (LONG, SHORT), Machine.cpu(CORES), created="")
    writer = TraceWriter(path.open("wb"), head)
    engine = Engine((LONG, SHORT), policy, belief, Machine.cpu(CORES))
    simulate(engine, TableWorld(BELIEF, failure_rate=float(failing)), queries, lambda *_: None, log=writer)
    writer.close()


def at(number: int, tenant: Tenant, arrival_ms: float, **more: int) -> Query:
    arrival = round(arrival_ms * MS)
    return Query(number, tenant.name, arrival, arrival + tenant.slo_ns, **more)


def story(path: Path, query: int) -> list[str]:
    return explain(read(path)[1], query).sentences()


def test_a_query_that_waited_for_another_tenants_segment(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, Edf(ONE_LANE, preempt=True, slack_share=0.0), [at(0, LONG, 0), at(1, SHORT, 10), at(2, SHORT, 12)])
    assert story(path, 1) == [
        "Query 1 of 'short' was answered after 45.0 ms; its deadline was 50.0 ms.",
        "It waited 30.0 ms and ran 15.0 ms in 1 launch(es); 0 queries of its tenant waited before it.",
        "Other launches meanwhile: long 30.0 ms.",
        "+30.0 ms: units 0 to 1 in a batch of 2 on cores 0,1: took 15.0 ms, predicted 15.0 ms, headroom 5.0 ms",
    ]
    assert story(path, 2)[1].endswith("1 queries of its tenant waited before it.")
    told = explain(read(path)[1], 0)
    assert [(launch.units, launch.end_ns - launch.start_ns) for launch in told.launches] == [
        ((0, 2), 40 * MS),
        ((2, 4), 40 * MS),
    ]
    assert told.waiting_ns == 15 * MS
    assert told.beside_ns == {"short": 15 * MS}
    assert told.sentences()[0] == "Query 0 of 'long' was answered after 95.0 ms; its deadline was 300.0 ms."


def test_a_launch_that_was_enqueued_behind_another_one(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, Overlap(ONE_LANE, preempt=False, enqueue_ms=1000.0), [at(0, LONG, 0), at(1, LONG, 10)])
    assert story(path, 1)[-1] == (
        "+70.0 ms: launch 1, units 0 to 4 in a batch of 1 on cores 0,1 after launch 0 (enqueued at +0.0 ms): took "
        "80.0 ms, predicted 80.0 ms, headroom 220.0 ms"
    )
    assert "enqueued" not in story(path, 0)[-1]


class Fit(FittedGroups):
    """Groups of as many members as `sizes` says were measured, one less of them near; no member slows another."""

    quantile, key = 0.5, "fit"

    def __init__(self, *sizes: int) -> None:
        self.measured = frozenset(sizes)

    @property
    def sizes(self) -> frozenset[int]:
        return self.measured

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        return BELIEF.group_ns(groups)

    def bounds_ns(self, groups: Sequence[Group]) -> list[tuple[int, int]]:
        return [(1, sum(BELIEF.latency_ns(*member) for member in group)) for group in groups]

    def near(self, group: Group) -> int:
        return len(group) - 1 if len(group) in self.measured else 0


def basis(path: Path, query: int, fit: Fit | None) -> str:
    """The last sentence of a query's story, where this fit is there to be asked."""

    def find(key: str, quantile: float) -> Fit:
        if fit is None:
            raise TraceError(f"no fit {key}")
        return fit

    head, records = read(path)
    return explain(records, query, GroupFits(head, rebuild_policy, find)).sentences()[-1]


@pytest.mark.parametrize("enqueue_ms", [0.0, 30.0])
def test_what_the_prediction_of_a_group_rested_on(tmp_path: Path, enqueue_ms: float) -> None:
    path = tmp_path / "trace"
    queries = [at(0, LONG, 0), Query(1, "long", 1 * MS, 379 * MS), Query(2, "short", 2 * MS, 379 * MS)]
    policy = Overlap(TWO_LANES, preempt=False, repeat=False, enqueue_ms=enqueue_ms)
    ends = {
        frozenset({1, 2}): "ms; predicted as a group of 2, beside 'short' on cores 1, with 1 measured group near it",
        frozenset(
            {1}
        ): "on cores 1, with no measured groups near it, a size never measured: at most 90.0 ms, one by one",
    }
    for measured, end in ends.items():
        fit = Fit(*measured)
        record(path, policy, queries, belief=GroupedPredictor(BELIEF.tables, fitted=fit))
        assert basis(path, 0, fit).endswith("predicted as a group of 1 with no measured groups near it")
        assert basis(path, 1, fit).endswith(end)
        assert basis(path, 0, None).endswith("predicted as a group of 1"), "the fit has been deleted"
    assert "group" not in story(path, 0)[-1], "nobody asks"
    record(path, policy, queries)
    assert "measured" not in basis(path, 1, Fit()), "nothing is known of groups"


def test_a_group_in_a_partition_names_its_members_and_a_turn_alone_is_no_group(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    pair = Slot("long", 1, 5.0, 1, 1), Slot("short", 2, 5.0, 1, 1)
    queries = [at(0, LONG, 0), Query(1, "short", 1 * MS, 379 * MS), Query(2, "long", 2 * MS, 379 * MS)]
    policy, fit = DutyCycle(ONE_LANE, rounds=(Round(90 * MS, pair),)), Fit(1, 2)
    record(path, policy, queries, belief=GroupedPredictor(BELIEF.tables, fitted=fit))
    assert basis(path, 0, fit).endswith("on cores 0,1: took 80.0 ms, predicted 80.0 ms, headroom 220.0 ms")
    assert basis(path, 1, fit).endswith(
        "; predicted as a group of 2, beside 'long' on cores 0, with 1 measured group near it"
    )
    assert "predicted 80.0 ms" in story(path, 1)[-1], "the time of the group"
    assert basis(path, 2, fit).endswith("beside 'short' on cores 1, with 1 measured group near it")


def test_queries_that_are_late_dropped_rejected_and_failed(tmp_path: Path) -> None:
    queries = [at(0, LONG, 0), at(1, SHORT, 1)]
    record(tmp_path / "late", Edf(ONE_LANE, DropRule.NONE, preempt=False), queries)
    late = story(tmp_path / "late", 1)
    assert late[0] == "Query 1 of 'short' was late after 89.0 ms; its deadline was 50.0 ms."
    assert late[1] == "Reason given to the client: late by 39.0 ms."
    record(tmp_path / "dropped", Edf(ONE_LANE, DropRule.EXPIRED, preempt=False), queries)
    assert story(tmp_path / "dropped", 1) == [
        "Query 1 of 'short' was dropped after 50.0 ms; its deadline was 50.0 ms.",
        "Reason given to the client: timed out after 50.0 ms in the queue.",
        "It waited 50.0 ms and ran 0.0 ms in 0 launch(es); 0 queries of its tenant waited before it.",
        "Other launches meanwhile: long 50.0 ms.",
    ]
    hopeless = Query(0, "long", 0, 20 * MS)
    record(tmp_path / "rejected", Edf(ONE_LANE), [hopeless])
    assert story(tmp_path / "rejected", 0)[:2] == [
        "Query 0 of 'long' was rejected after 0.0 ms; its deadline was 20.0 ms.",
        "Reason given to the client: 80.0 ms of work do not fit into 20.0 ms.",
    ]
    record(tmp_path / "failed", Edf(ONE_LANE), [at(0, SHORT, 0)], failing=True)
    told = story(tmp_path / "failed", 0)
    assert told[1] == "Reason given to the client: injected fault."
    assert told[-1].endswith("headroom 40.0 ms, failed: injected fault")


def test_two_lanes_run_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, Edf(TWO_LANES, DropRule.NONE, preempt=False), [at(0, LONG, 0), at(1, LONG, 0), at(2, SHORT, 20)])
    told = explain(read(path)[1], 2)
    assert told.beside_ns == {"long": 120 * MS}  # 60 ms on each of two lanes
    assert told.launches[0].cores in ((0,), (1,))


def live(path: Path, events: Sequence[tuple[int, Event]], policy: Edf) -> None:
    engine = Engine((LONG, SHORT), policy, BELIEF, Machine.cpu(CORES))
    writer = TraceWriter(path.open("wb"), header(policy, BELIEF, (LONG, SHORT), Machine.cpu(CORES), created=""))
    for now, event in events:
        writer(now, event, engine.handle(event, now))
    writer.close()


def test_only_those_are_ahead_who_still_wait(tmp_path: Path) -> None:
    """Cancelled and failed queries have left the queue; hopeless ones of a paused batch had left it before."""
    path = tmp_path / "trace"
    events: list[tuple[int, Event]] = [
        (0, QueryArrived(at(0, LONG, 0))),
        (1, QueryArrived(at(1, SHORT, 0))),
        (2, QueryArrived(at(2, SHORT, 0))),
        (3, QueryCancelled(1)),
        (4, QueryArrived(at(3, SHORT, 0))),
        (5, TenantRemoved("short", "unloaded")),
        (6, QueryArrived(at(4, LONG, 0))),
        (70 * MS, LaunchEnded(0)),
        (71 * MS, QueryArrived(at(5, LONG, 71))),
        (72 * MS, QueryCancelled(0)),
        (73 * MS, QueryCancelled(5)),
    ]
    live(path, events, Edf(ONE_LANE, preempt=True, slack_share=0.0))
    assert explain(read(path)[1], 2).ahead == 1
    assert explain(read(path)[1], 3).ahead == 1  # the second one; the first was cancelled
    assert explain(read(path)[1], 3).outcome == "failed"
    assert explain(read(path)[1], 5).ahead == 1
    cancelled = explain(read(path)[1], 0)
    assert (cancelled.outcome, len(cancelled.launches)) == ("cancelled", 2)
    with pytest.raises(TraceError, match="query 4 has not ended in this trace"):
        explain(read(path)[1], 4)


def test_a_reload_is_told_to_queries_of_its_model_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    events: list[tuple[int, Event]] = [
        (0, QueryArrived(at(0, LONG, 0))),
        (1, QueryArrived(at(1, SHORT, 0))),
        (5 * MS, TenantChanged(SHORT)),
        (5 * MS, PredictorChanged(BELIEF)),
        (5 * MS, TenantResumed("short")),
        (20 * MS, LaunchEnded(0)),
        (30 * MS, LaunchEnded(1)),
        (60 * MS, LaunchEnded(2)),
    ]
    live(path, events, Edf(ONE_LANE, preempt=True, slack_share=0.0))
    told = "+5.0 ms: its model was reloaded: a query not in its last launch waits for the new model."
    assert told in story(path, 1)
    assert told not in story(path, 0)


def test_a_dropped_paused_batch_was_no_longer_waiting(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    events: list[tuple[int, Event]] = [
        (0, QueryArrived(Query(0, "long", 0, 100 * MS))),
        (90 * MS, LaunchEnded(0)),  # the second half cannot be done in time: hopeless, dropped while paused
        (91 * MS, QueryArrived(at(1, LONG, 91))),
        (92 * MS, QueryArrived(at(2, LONG, 92))),
        (93 * MS, QueryArrived(at(3, LONG, 93))),
        (94 * MS, QueryCancelled(3)),
    ]
    live(path, events, Edf(ONE_LANE, preempt=True, slack_share=0.0))
    assert explain(read(path)[1], 0).outcome == "dropped"
    assert explain(read(path)[1], 3).ahead == 1


def test_a_query_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    record(path, Edf(ONE_LANE), [at(0, SHORT, 0)])
    monkeypatch.setattr("sys.argv", ["cotenant", "explain", "7", str(path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    message = f"cotenant: query 7 is not in this trace; answers carry their number in the header {QUERY_KEY!r}\n"
    assert capsys.readouterr().err == message


def test_the_lanes_of_a_launch_that_ran_by_a_placement(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, Edf(ONE_LANE, preempt=False), [at(0, SHORT, 0)])
    pieces = [[[0, 1], 4, 0, 4 * MS], [[0], 3, 4 * MS, 8 * MS], [[1], 2, 4 * MS, 6 * MS], [[0], 1, 8 * MS, 10 * MS]]
    lines = path.read_text().splitlines()
    ended = next(number for number, line in enumerate(lines) if '"LaunchEnded"' in line)
    assert '"task_times"' not in lines[ended]  # of a launch as any other
    lines[ended] = lines[ended].replace('"error":null', f'"error":null,"task_times":{json.dumps(pieces)}')
    path.write_text("\n".join(lines) + "\n")
    told = explain(read(path)[1], 0)
    assert isinstance(told, QueryHistory)
    assert told.launches[0].task_times[2] == TaskTime((1,), 2, 4 * MS, 6 * MS)
    assert told.sentences()[-2:] == [
        f"    core 0 │{'█' * 50}│ 10.0 ms of 10.0 ms, 8 units in 3 tasks",
        f"    core 1 │{'█' * 30}{'·' * 20}│ 6.0 ms of 10.0 ms, 6 units in 2 tasks",
    ]


def test_pointers_and_chunks_of_a_joint_plan_are_named(tmp_path: Path) -> None:
    """Both rows of short run beside each other, and the end of long waits for the one on the other core."""
    plan = JointPlan(
        (JointMember("long", 1, 4), JointMember("short", 2, 1)),
        waits=(Wait(0, 2, 1, 1),),
        chunks=(Chunk(1, 0, 1, (1, 1)),),
    )
    policy = JointSchedule(TWO_LANES, joint_plans=(plan,))
    engine, path = Engine((LONG, SHORT), policy, BELIEF, Machine.cpu(CORES)), tmp_path / "trace.jsonl"
    log = TraceWriter(path.open("wb"), header(policy, BELIEF, (LONG, SHORT), Machine.cpu(CORES), created=""))
    events: list[tuple[int, Event]] = [
        (0, QueryArrived(Query(0, "long", 0, 300 * MS), more=True)),
        (0, QueryArrived(Query(1, "short", 0, 300 * MS, items=2))),
        *((at * MS, LaunchEnded(number)) for number, at in enumerate((40, 10, 20, 80))),
    ]
    for at, event in sorted(events, key=lambda each: each[0]):
        log(at, event, engine.handle(event, at))
    log.close()
    long, short = (explain(read(path)[1], query).sentences() for query in (0, 1))
    assert [line.partition(": took")[0] for line in long[3:] if "launch" in line][-1] == (
        "+40.0 ms: launch 3, units 2 to 4 in a batch of 1 on cores 0 after launch 0 and 1 and 2, "
        "a synchronisation pointer to units 0 to 1 of 'short' (enqueued at +0.0 ms)"
    )
    assert "units 0 to 1 of the chunk of rows 0 to 1 in a batch of 1 on cores 1" in short[3] + short[4]
