"""Another policy in the middle of things: nothing is lost, nothing is cut, and the trace knows it."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from cotenant import trace
from cotenant.config import load_server_config
from cotenant.core.actions import Launch, Respond
from cotenant.core.events import Event, LaunchEnded, PolicyChanged, QueryArrived, TenantResumed, TenantSuspended
from cotenant.core.snapshot import DropRule, Policy
from cotenant.errors import InvalidValueError
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.sjf import Sjf
from cotenant.policies.registry import make_policy as configured
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.trace import TraceError
from cotenant.trace.explain import explain
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Round, Share, Slot
from machines import EngineMachine, Watched, walk
from scenario import CORES, MS, ONE_LANE, TWO_LANES, tables
from strict_engine import StrictEngine as Engine

ROUNDS = (
    Round(60, (Slot("quick", 3, 10.0), Slot("wide", 2, 5.0))),
    Round(200, (Slot("quick", 1, 2.0),)),
)
GROUPED = Round(90, (Slot("quick", 2, 10.0, 1, 1), Slot("wide", 2, 5.0, 1, 1), Slot("quick", 1, 2.0)))
CHOICES: tuple[Policy, ...] = (
    DutyCycle(ONE_LANE, rounds=(GROUPED,)),
    DutyCycle(ONE_LANE, DropRule.EXPIRED, rounds=(GROUPED,), backfill=False),
    DutyCycle(TWO_LANES, rounds=ROUNDS),
    DutyCycle(TWO_LANES, DropRule.EXPIRED, rounds=ROUNDS[::-1], preempt=True),
    DutyCycle(ONE_LANE, DropRule.NONE, rounds=ROUNDS[:1], backfill=False),
    DutyCycle((Share((1,)),), rounds=ROUNDS[1:]),
    DutyCycle(TWO_LANES, DropRule.NONE),
    Edf(ONE_LANE, slack_share=0.0),
    Sjf(TWO_LANES, DropRule.NONE),
    Fcfs(TWO_LANES, DropRule.EXPIRED),
    Overlap(TWO_LANES),
)


class ChangingMachine(EngineMachine):
    """The machine of the core's properties, in which the policy changes as well."""

    @rule(pick=st.integers(0, len(CHOICES) - 1))
    def change_policy(self, pick: int) -> None:
        self.policy = CHOICES[pick]
        self.partitions = set(self.policy.spec.shares)
        self.tell(PolicyChanged(Watched(self.policy)))

    def tell(self, event: Event) -> None:
        if isinstance(event, PolicyChanged):  # the log needs the policy as it is, not the one under watch
            log = self.log
            self.log = lambda now, _, actions: log(now, PolicyChanged(self.policy), actions)
            try:
                super().tell(event)
            finally:
                self.log = log
        else:
            super().tell(event)

    def check_respond(self, respond: Respond, event: Event, ended: Launch | None) -> None:
        query = self.arrived[respond.query]
        expiry = self.expiry(query)
        if "is not in the plan" in respond.reason:
            assert respond.outcome is Outcome.DROPPED
            assert isinstance(self.policy, DutyCycle)
            assert query.tenant not in self.policy.slots_of
            self.forget(respond)
            return
        if isinstance(event, PolicyChanged) and expiry is not None and expiry < self.now and query.id in self.queued:
            assert respond.outcome is Outcome.DROPPED  # it had waited beyond what the new rule allows
            self.forget(respond)
            return
        super().check_respond(respond, event, ended)

    def forget(self, respond: Respond) -> None:
        del self.queued[respond.query]
        self.ended[respond.query] = respond.outcome
        self.tensors.discard(respond.query)

    def check_launch(self, launch: Launch) -> None:
        policy = self.policy
        if launch.batch in self.batches:  # begun under a policy that stops at cuts: it goes on from there
            self.policy = replace(policy, preempt=True)
        super().check_launch(launch)
        self.policy = policy

    @invariant()
    def nothing_waits_beside_a_free_lane(self) -> None:
        """A lane that has no time for guests may be free while they wait, but never while one of its slots waits."""
        if not hasattr(self, "engine"):
            return
        if not isinstance(self.policy, DutyCycle) or not self.policy.rounds:
            EngineMachine.nothing_waits_beside_a_free_lane(self)
            return
        busy = sum(launch.share.mask for launch in self.running.values())
        waiting = {query.tenant for query in self.queued.values()} - self.suspended
        for lane, made in zip(self.policy.lanes, self.policy.rounds, strict=True):
            if lane.mask & busy == 0:
                assert not waiting & {slot.tenant for slot in made.slots}


def test_every_history_keeps_the_contract_when_the_policy_changes_at_any_time() -> None:
    machine = type("Machine", (ChangingMachine,), {"policy_name": "edf", "preempt": True})
    run_state_machine_as_test(
        seed(20261122)(machine),  # not the histories of another machine
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None, database=None),
    )


def test_long_histories_keep_the_contract_when_the_policy_changes_at_any_time() -> None:
    class Walking(ChangingMachine):
        policy_name, preempt = "edf", True
        seen: ClassVar[Counter[str]] = Counter()
        rng: Random

        def wait(self, step: int) -> None:
            if self.rng.random() < 0.3:
                self.seen["changed"] += 1
                self.change_policy(self.rng.randrange(len(CHOICES)))
            super().wait(step)

    for number in range(120):
        machine = Walking()
        machine.rng = Random(number)
        walk(machine, machine.rng)
    assert Walking.seen["changed"] > 150
    reached = ("left, paused", "a merged batch failed", "expired, paused", "the policy changed, paused")
    short = {name: Walking.seen[name] for name in reached if Walking.seen[name] < 3}
    assert not short, f"histories that reach too little: {short}"


COSTS = tables({"a": 10 * MS, "b": 10 * MS, "long": 90 * MS}, units=3)
TENANTS = (Tenant("a", 100 * MS), Tenant("b", 50 * MS), Tenant("long", 500 * MS, cuts=(0, 1, 2, 3)))


def engine(policy: Policy) -> Engine:
    made = {name: replace_units(COSTS.tables[name], 1) for name in ("a", "b")}
    return Engine(TENANTS, policy, TablePredictor({**COSTS.tables, **made}), Machine.cpu(CORES))


def replace_units(table: LatencyTable, units: int) -> LatencyTable:
    return LatencyTable(table.rows, (1.0,) * units)


def query(number: int, name: str, at_ms: int, slo_ms: int = 100) -> Query:
    return Query(number, name, at_ms * MS, (at_ms + slo_ms) * MS)


def launches(actions: list[Any]) -> list[Launch]:
    return [action for action in actions if isinstance(action, Launch)]


def test_busy_cores_are_waited_for_and_free_ones_are_used_at_once() -> None:
    core = engine(Edf(TWO_LANES))
    core.handle(QueryArrived(query(0, "a", 0)), 0)
    [running] = core.launches
    rounds = (Round(50 * MS, (Slot("a", 1, 5.0), Slot("b", 1, 5.0))),)
    core.handle(PolicyChanged(DutyCycle(ONE_LANE, rounds=rounds)), 1 * MS)
    assert core.launches == (running,)
    assert launches(core.handle(QueryArrived(query(1, "b", 2)), 2 * MS)) == []  # core 1 is free, core 0 is not
    [launch] = launches(core.handle(LaunchEnded(running), 10 * MS))
    assert (launch.work.tenant, launch.share) == ("b", ONE_LANE[0])


def test_queues_get_the_order_of_the_new_policy_also_of_suspended_tenants() -> None:
    core = engine(Fcfs(ONE_LANE, DropRule.NONE))
    core.handle(QueryArrived(query(0, "a", 0)), 0)
    core.handle(TenantSuspended("b", "its worker died"), 1 * MS)
    for number, slo_ms in ((1, 90), (2, 30)):
        core.handle(QueryArrived(query(number, "b", 1, slo_ms)), 1 * MS)
    core.handle(PolicyChanged(Edf(ONE_LANE, DropRule.NONE)), 2 * MS)
    core.handle(LaunchEnded(0), 10 * MS)
    [first] = launches(core.handle(TenantResumed("b"), 11 * MS))
    [second] = launches(core.handle(LaunchEnded(first.id), 21 * MS))
    assert (first.queries, second.queries) == ((2,), (1,))


def test_a_paused_batch_goes_on_where_the_plan_has_no_place_for_it() -> None:
    core = engine(Edf(ONE_LANE, slack_share=0.0))
    core.handle(QueryArrived(query(0, "long", 0, 500)), 0)
    actions = core.handle(LaunchEnded(0), 30 * MS)
    [second] = launches(actions)
    tight = (Round(20 * MS, (Slot("b", 1, 5.0),)),)
    core.handle(PolicyChanged(DutyCycle(ONE_LANE, rounds=tight)), 31 * MS)
    core.handle(QueryArrived(query(1, "b", 32, 90)), 32 * MS)
    [planned] = launches(core.handle(LaunchEnded(second.id), 60 * MS))
    assert planned.work.tenant == "b"
    [rest] = launches(core.handle(LaunchEnded(planned.id), 70 * MS))
    assert (rest.batch, rest.work.start, rest.last) == (second.batch, 2, True)
    [answer] = core.handle(LaunchEnded(rest.id), 100 * MS)
    assert isinstance(answer, Respond)
    assert answer.outcome is Outcome.ANSWERED


def test_a_lane_outside_the_device_is_refused_and_the_old_policy_stays() -> None:
    old = Edf(ONE_LANE)
    core = engine(old)
    with pytest.raises(InvalidValueError, match="a share of the machine"):
        core.handle(PolicyChanged(Edf((Share((7,)),))), 0)
    assert core.policy is old
    assert launches(core.handle(QueryArrived(query(0, "a", 0)), 0))


def test_a_trace_with_a_change_replays_and_explains_itself(tmp_path: Path) -> None:
    first, second = Edf(TWO_LANES), DutyCycle(ONE_LANE, rounds=(Round(50 * MS, (Slot("a", 2, 5.0),)),))
    believed = TablePredictor({"a": LatencyTable((LatencyRow(0, 1, 1, 10 * MS),))})
    core = Engine(TENANTS[:1], first, believed, Machine.cpu(CORES))
    file = io.BytesIO()
    log = trace.TraceWriter(file, trace.header(first, believed, TENANTS[:1], Machine.cpu(CORES), created=""))
    steps: list[tuple[int, Event]] = [
        (0, QueryArrived(query(0, "a", 0))),
        (1, PolicyChanged(second)),
        (2, QueryArrived(query(1, "a", 2))),
        (10, LaunchEnded(0)),
        (20, LaunchEnded(1)),
    ]
    for at, event in steps:
        log(at * MS, event, core.handle(event, at * MS))
    log.flush()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(file.getvalue())
    head, records = trace.read(path)
    lines = [line for _, line in trace.replay(head, records, rebuild_policy)]
    assert lines == file.getvalue().splitlines()[1:]
    story = explain(trace.read(path)[1], 0)
    assert story.notes == [(1 * MS, "the plan or the policy changed, to another 'duty_cycle'")]
    assert "+1.0 ms: the plan or the policy changed, to another 'duty_cycle'." in story.sentences()
    change = list(trace.read(path)[1])[1]
    with pytest.raises(TraceError, match="changes to the policy 'duty_cycle'"):
        trace.decode_event(change.kind, change.event)


def test_the_former_name_of_the_option_backfill_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cotenant.toml"
    path.write_text("[policy]\nname = 'duty_cycle'\nlend = false\n", encoding="utf-8")
    for _ in range(2):
        assert load_server_config(path).policy.options == {"backfill": False}
    text = f"{path}: policy.lend is deprecated and ends with version 0.3: use 'backfill' instead"
    assert caplog.messages.count(text) == 1
    policy = configured("duty_cycle", {"backfill": False}, TWO_LANES, {"rounds": ROUNDS})
    old = trace.encode(0, PolicyChanged(policy), []).replace(b'"backfill":', b'"lend":')
    record = msgspec.json.decode(old)
    back = trace.decode_event(record[1], record[2], make_policy=rebuild_policy)
    assert isinstance(back, PolicyChanged)
    assert back.policy == policy


def test_a_plans_policy_comes_back_from_its_options() -> None:
    policy = configured(
        "duty_cycle", {"preempt": True, "backfill": False, "slack_share": 0.5}, TWO_LANES, {"rounds": ROUNDS}
    )
    assert isinstance(policy, DutyCycle)
    assert (policy.rounds, policy.backfill, policy.preempt, policy.slack_share) == (ROUNDS, False, True, 0.5)
    line = trace.encode(0, PolicyChanged(policy), [])
    assert b'"policy":"duty_cycle"' in line
    record = msgspec.json.decode(line)
    back = trace.decode_event(record[1], record[2], make_policy=rebuild_policy)
    assert isinstance(back, PolicyChanged)
    assert back.policy == policy
