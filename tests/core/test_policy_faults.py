"""A fault of a policy costs its decision: injected at each call site, in random histories, of every kind.

Each history goes on to its end: every query has one outcome, and a replay repeats all of it byte for byte, whether the
policy of the replay fails where the recorded one did or not.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import structs

from cotenant import trace
from cotenant.core.actions import Action, Launch, PolicyFault, Respond
from cotenant.core.engine import Engine
from cotenant.core.events import (
    Event,
    LaunchEnded,
    PolicyChanged,
    QueryArrived,
    QueryCancelled,
    TenantResumed,
    TenantSuspended,
    TimerFired,
)
from cotenant.core.faults import MOST_FAULTS, RETRY_NS, WITHIN_NS
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, Drop, DropRule, Policy, Snapshot, Start
from cotenant.errors import InvalidValueError
from cotenant.policies import policy_class, policy_names
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.table import TablePredictor
from cotenant.sim.driver import simulate
from cotenant.trace.explain import explain
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share
from cotenant.world.simulated import TableWorld
from installed import known
from machines import MODELS, TENANTS
from scenario import CORES, ONE_LANE, TWO_LANES

PREDICTOR = TablePredictor(MODELS)
STRANGER = Query(10**6, "quick", 0, 10)


def _raised(decision: Decision) -> Decision:
    raise ZeroDivisionError("integer division or modulo by zero")


def _each(change: Callable[[Start], Start]) -> Callable[[Decision], Decision]:
    return lambda decision: structs.replace(decision, starts=tuple(map(change, decision.starts)) or (None,))


KINDS: dict[str, Callable[[Decision], Any]] = {
    "exception": _raised,
    "nothing": lambda decision: None,
    "a list": lambda decision: structs.replace(decision, starts=list(decision.starts)),
    "no start": lambda decision: structs.replace(decision, starts=("start",)),
    "unknown query": _each(lambda start: structs.replace(start, queries=(STRANGER,), batch=None)),
    "changed query": _each(
        lambda start: (
            structs.replace(start, queries=tuple(structs.replace(q, deadline_ns=1) for q in start.queries))
            if start.queries
            else structs.replace(start, batch=-1)
        )
    ),
    "slot twice": lambda decision: structs.replace(decision, starts=(*decision.starts, *decision.starts) or (None,)),
    "wrong units": _each(lambda start: structs.replace(start, work=start.work.until(99))),
    "wrong share": _each(lambda start: structs.replace(start, share=Share(start.share.cores, "elsewhere"))),
    "time that is no number": _each(lambda start: structs.replace(start, predicted_ns=None)),
    "time with a point": _each(lambda start: structs.replace(start, predicted_ns=1.5)),
    "drop without a reason": lambda decision: structs.replace(decision, drops=(Drop(10**6, ""), Drop(0, None))),  # type: ignore[arg-type]
}
KEYS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "nothing": lambda key: None,
    "text": lambda key: ("soon", *key),
    "not its own": lambda key: (0, -1),
    "not a number": lambda key: (float("nan"), *key),
    "a list": list,
}


class Failing:
    """A policy whose calls of these numbers fail, counted for `decide` and `queue_key` apart."""

    def __init__(self, policy: Policy, kind: str, decisions: set[int], keys: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self._policy, self._kind, self._at, self._keys_at = policy, kind, decisions, keys
        self.spec = policy.spec
        self.asked = self.keyed = 0

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Any:
        self.keyed += 1
        key = self._policy.queue_key(query, tenant, predictor)
        if self.keyed not in self._keys_at:
            return key
        if self._kind in KEYS:
            return KEYS[self._kind](key)
        raise KeyError(query.id)

    def decide(self, snapshot: Snapshot, memory: object) -> Any:
        self.asked += 1
        decision = self._policy.decide(snapshot, memory)
        return KINDS.get(self._kind, _raised)(decision) if self.asked in self._at else decision


def history(rng: Random, running: dict[int, Launch], timers: list[int]) -> Iterator[tuple[int, Event]]:
    """Events of a small world: arrivals, some with others at once, ends, failures, cancels, and workers that die."""
    now, number = 1, 0
    for _ in range(60):
        now += rng.choice([0, 1, 5, 20])
        while timers and timers[0] <= now:
            yield timers.pop(0), TimerFired()
        step = rng.random()
        if step < 0.5 or not running:
            tenant = TENANTS[rng.choice(sorted(TENANTS))]
            deadline = now + rng.choice([tenant.slo_ns, tenant.slo_ns, 10])
            yield now, QueryArrived(Query(number, tenant.name, now, deadline, items=rng.choice([1, 1, 2]) % 3))
            number += 1
        elif step < 0.85:
            yield now, LaunchEnded(rng.choice(sorted(running)), rng.choice([None, None, None, "it broke"]))
        elif step < 0.92:
            yield now, QueryCancelled(rng.randrange(number + 1))
        else:
            name = rng.choice(sorted(TENANTS))
            yield now, TenantSuspended(name, "its worker died")
            yield now, TenantResumed(name)
    while running:
        now += 1
        yield now, LaunchEnded(min(running))
    for each in range(number):
        yield now, QueryCancelled(each)
        while running:
            yield now, LaunchEnded(min(running))


def lived(engine: Engine, policy: Policy, rng: Random) -> tuple[list[PolicyFault], bytes]:
    """Run a history to its end; check the books; give the faults and the trace."""
    file = io.BytesIO()
    log = trace.TraceWriter(file, trace.header(policy, PREDICTOR, TENANTS.values(), Machine.cpu(CORES), created=""))
    running: dict[int, Launch] = {}
    timers: list[int] = []
    came: set[int] = set()
    ended: list[int] = []
    faults: list[PolicyFault] = []
    for now, event in history(rng, running, timers):
        if isinstance(event, LaunchEnded):
            del running[event.launch]
        if isinstance(event, QueryArrived):
            came.add(event.query.id)
        actions: list[Action] = engine.handle(event, now)
        log(now, event, actions)
        for action in actions:
            if isinstance(action, Launch):
                assert all(not action.share.mask & other.share.mask for other in running.values())
                running[action.id] = action
            elif isinstance(action, Respond):
                ended.append(action.query)
            elif isinstance(action, PolicyFault):
                faults.append(action)
            elif type(action).__name__ == "SetTimer":
                timers[:] = [action.at_ns]  # type: ignore[union-attr]
        assert set(running) == {each for each in engine.launches if each not in engine.snapshot(now).waiting}
    assert sorted(ended) == sorted(came), "one outcome for each query"
    assert engine.live == 0
    log.flush()
    return faults, file.getvalue()


def replayed(written: bytes, folder: Path) -> bytes:
    path = folder / "trace.jsonl"
    path.write_bytes(written)
    head, records = trace.read(path)
    return b"\n".join(line for _, line in trace.replay(head, records, rebuild_policy))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", policy_names())
def test_a_fault_costs_its_decision_alone(name: str, kind: str, tmp_path: Path) -> None:
    met = 0
    for at in (1, 2, 7):
        for lanes in (ONE_LANE, TWO_LANES):
            rng = Random(f"{name} {kind} {at}")
            policy = policy_class(name)(lanes, rng.choice(list(DropRule)))
            failing: Any = Failing(policy, kind, {at, at + 9})
            engine = Engine(TENANTS.values(), failing, PREDICTOR, Machine.cpu(CORES))
            faults, written = lived(engine, policy, rng)
            met += len(faults)
            assert {fault.policy for fault in faults} <= {name}
            assert sum(engine.guard.faults.values()) == len(faults)
            assert replayed(written, tmp_path).splitlines() == written.splitlines()[1:]
    assert met >= 3


@pytest.mark.parametrize("kind", ["exception", *KEYS])
@pytest.mark.parametrize("name", known("edf", "fcfs", "shares", "overlap", "layer_block"))
def test_a_fault_of_a_queue_key_costs_the_key_alone(name: str, kind: str, tmp_path: Path) -> None:
    for at in (1, 3, 8, 15):
        rng = Random(f"{name} {kind} {at}")
        policy = policy_class(name)(TWO_LANES)
        failing: Any = Failing(policy, kind, set(), {at, at + 1})
        engine = Engine(TENANTS.values(), failing, PREDICTOR, Machine.cpu(CORES))
        faults, written = lived(engine, policy, rng)
        assert faults[0].call == "queue_key"
        assert faults[0].query >= 0
        assert replayed(written, tmp_path).splitlines() == written.splitlines()[1:]


def test_what_an_event_did_before_the_fault_is_carried_out() -> None:
    policy = Edf(ONE_LANE, DropRule.NONE)
    failing: Any = Failing(policy, "exception", {2})
    engine = Engine(TENANTS.values(), failing, PREDICTOR, Machine.cpu(CORES))
    engine.handle(QueryArrived(Query(0, "quick", 0, 40)), 0)
    engine.handle(QueryArrived(Query(1, "quick", 0, 40)), 0)
    answer, launch, fault = engine.handle(LaunchEnded(0), 9)
    assert isinstance(answer, Respond)
    assert (answer.query, launch.queries) == (0, (1,))  # type: ignore[union-attr]
    assert isinstance(fault, PolicyFault)
    assert fault.reason == "ZeroDivisionError: integer division or modulo by zero"


def test_after_three_faults_in_a_minute_a_fallback_serves_until_the_policy_is_set_anew() -> None:
    apart = [0, WITHIN_NS, 2 * WITHIN_NS, 2 * WITHIN_NS + 1, 2 * WITHIN_NS + 2]
    policy = Edf(ONE_LANE, DropRule.NONE)
    failing: Any = Failing(policy, "exception", set(range(1, 99)))
    engine = Engine(TENANTS.values(), failing, PREDICTOR, Machine.cpu(CORES))
    told = []
    for number, now in enumerate(apart):
        actions = engine.handle(QueryArrived(Query(number, "quick", now, now + 40)), now)
        [launch] = [action for action in actions if isinstance(action, Launch)]
        told += [action.falls_back for action in actions if isinstance(action, PolicyFault)]
        engine.handle(LaunchEnded(launch.id), now)
    assert told == [False, False, False, False, True]
    assert len(told) > MOST_FAULTS
    asked = failing.asked
    engine.handle(QueryArrived(Query(9, "quick", apart[-1], apart[-1] + 40)), apart[-1])
    assert failing.asked == asked
    assert engine.guard.falls_back
    engine.handle(PolicyChanged(policy), apart[-1])
    assert not engine.guard.falls_back


def test_where_the_fallback_fails_too_the_engine_asks_again() -> None:
    class Broken(TablePredictor):
        is_broken = True

        def latency_ns(self, work: Any, cores: int) -> int:
            if self.is_broken:
                raise MemoryError
            return super().latency_ns(work, cores)

    predictor = Broken(MODELS)
    predictor.is_broken = False
    engine = Engine(TENANTS.values(), Edf(ONE_LANE, DropRule.NONE), predictor, Machine.cpu(CORES))
    engine.handle(QueryArrived(Query(0, "quick", 0, 40)), 0)
    engine.handle(QueryArrived(Query(1, "long", 0, 400)), 0)
    predictor.is_broken = True
    *_, timer = engine.handle(LaunchEnded(0), 9)
    assert timer.at_ns == 9 + RETRY_NS  # type: ignore[union-attr]
    assert engine.guard.faults == {("edf", "decide"): 1, ("fallback-edf", "decide"): 1}
    predictor.is_broken = False
    [launch] = engine.handle(TimerFired(), 9 + RETRY_NS)
    assert launch.queries == (1,)  # type: ignore[union-attr]


def test_the_simulator_goes_on_and_explain_names_the_fault(tmp_path: Path) -> None:
    policy = Edf(TWO_LANES)
    failing: Any = Failing(policy, "exception", {3})
    engine = Engine(TENANTS.values(), failing, PREDICTOR, Machine.cpu(CORES))
    path = tmp_path / "trace.jsonl"
    head = trace.header(policy, PREDICTOR, TENANTS.values(), Machine.cpu(CORES), created="")
    writer = trace.TraceWriter(path.open("wb"), head)
    queries = [Query(number, "quick", number, number + 300) for number in range(4)]
    simulate(engine, TableWorld(PREDICTOR), queries, lambda *_: None, log=writer)
    writer.close()
    assert sum(engine.guard.faults.values()) == 1
    told = [line for number in range(4) for line in explain(trace.read(path)[1], number).sentences()]
    assert any("policy 'edf' failed in 'decide' (ZeroDivisionError" in line for line in told)


def test_a_policy_that_cannot_be_read_is_refused_and_the_old_one_stays() -> None:
    policy = Edf(ONE_LANE)
    blank = Failing(policy, "exception", set())
    blank.spec = structs.replace(policy.spec, shares=(Share((9,)),))
    engine = Engine(TENANTS.values(), policy, PREDICTOR, Machine.cpu(CORES))
    with pytest.raises(InvalidValueError):
        engine.handle(PolicyChanged(blank), 0)
    assert engine.policy is policy
