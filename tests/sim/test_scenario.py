"""Simulating a repository's models: its tenants, its profile, and the queries that a server would have made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.config import PolicySection
from cotenant.core.actions import Action, Launch, group_of
from cotenant.core.events import Event, LaunchEnded, PredictorChanged
from cotenant.core.predictor import Group
from cotenant.core.snapshot import DropRule
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.load.clients import ModelInfo
from cotenant.load.errors import LoadError
from cotenant.load.request_samples import sample_pool
from cotenant.predict.grouped import FittedGroups
from cotenant.predict.margin import NO_MARGIN
from cotenant.predict.table import TablePredictor
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile
from cotenant.sim.scenario import Assumptions, Scenario, queries, run_scenario, scenario_of
from cotenant.types import Outcome, priority_rank
from cotenant.work import Machine, Round, Slot
from cotenant.workload import Poisson, TenantLoad, Trace, Workload, parse_workload
from cotenant.world.contention import Contention, Traffic
from installed import known
from onnx_samples import residual_cnn
from repositories import add_sub, config, write_model
from scenario import MS, ONE_LANE, TWO_LANES

WORKLOAD = {
    "seed": 4,
    "duration_s": 4.0,
    "tenant": [
        {"name": "web", "model": "add_sub", "rate": 30.0, "priority": 1, "timeout_ms": 15.0},
        {"name": "batch", "model": "add_sub", "rate": 10.0, "slo_ms": 70.0, "items": 2},
        {"name": "vision", "model": "cnn", "rate": 8.0, "arrivals": "uniform"},
    ],
}


def model_profile(latency_ns: int, units: int) -> ModelProfile:
    points = (
        Point(0, 1, 1, 9, latency_ns, 2 * latency_ns, 2 * latency_ns, 2 * latency_ns),
        Point(0, 4, 1, 9, 3 * latency_ns, 6 * latency_ns, 6 * latency_ns, 6 * latency_ns),
    )
    return ModelProfile("", points, (1,) * units, tuple(range(units + 1)), 1.2)


PROFILE = Profile(this_device(), "", "", {"add_sub": model_profile(5 * MS, 1), "eye": model_profile(40 * MS, 4)})


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    write_model(tmp_path, "add_sub", config(max_batch=4, slo_ms=50), {1: add_sub})
    write_model(tmp_path, "cnn", config("eye", slo_ms=200, more="priority = 2\nweight = 3.0"), {1: residual_cnn})
    return scenario_of(tmp_path, workload(), PROFILE, TWO_LANES, "p50")


def workload() -> Workload:
    return parse_workload(WORKLOAD)


def test_tenants_come_from_the_repository_and_the_profile(scenario: Scenario) -> None:
    small, eye = scenario.tenants
    assert (small.name, small.max_batch, small.cuts) == ("add_sub", 4, (0, 1))
    assert small.slo_ns == 70 * MS  # the longest of its loads: one has an SLO of its own
    assert (eye.name, eye.priority, eye.weight, eye.cuts) == ("eye", 2, 3.0, (0, 1, 2, 3, 4))
    assert scenario.owners == (small, small, eye)
    assert scenario.machine == Machine.cpu((0, 1))
    assert scenario.slo_ns == {"web": 50 * MS, "batch": 70 * MS, "vision": 200 * MS}
    assert scenario.tables["eye"].segment_ratio == 1.2


def test_the_quantile_is_what_is_believed(tmp_path: Path, scenario: Scenario) -> None:
    careful = scenario_of(tmp_path, workload(), PROFILE, ONE_LANE, "p99")
    assert careful.tables["eye"].rows[0].latency_ns == 2 * scenario.tables["eye"].rows[0].latency_ns


def test_queries_are_those_that_the_server_would_make(scenario: Scenario) -> None:
    made = list(queries(scenario))
    assert [query.id for query in made] == list(range(len(made)))
    assert [query.arrival_ns for query in made] == sorted(query.arrival_ns for query in made)
    web = [query for query in made if query.expiry_ns is not None]
    assert web
    for query in web:
        assert query.deadline_ns == query.expiry_ns == query.arrival_ns + 15 * MS
        assert (query.tenant, query.rank, query.items) == ("add_sub", priority_rank(1), 1)
    vision = [query for query in made if query.tenant == "eye"]
    assert {(query.rank, query.deadline_ns - query.arrival_ns) for query in vision} == {
        (priority_rank(0), 200 * MS)
    }  # a tenant has its own
    batch = [query for query in made if query.tenant == "add_sub" and query.expiry_ns is None]
    assert {(query.items, query.deadline_ns - query.arrival_ns) for query in batch} == {(2, 70 * MS)}
    assert list(queries(scenario)) == made
    assert list(queries(scenario, 5)) != made


def run(
    scenario: Scenario, seed: int = 1, noise: float = 0.2, name: str = "edf", **options: object
) -> tuple[list[bytes], dict[str, int]]:
    lines: list[bytes] = []

    def log(now: int, event: Event, actions: list[Action]) -> None:
        lines.append(repr((now, event, actions)).encode())

    outcomes = run_scenario(scenario, PolicySection(name, options), Assumptions(noise, 50_000), seed, log)
    return lines, {name: len(outcomes.columns(name).ended_ns) for name in outcomes.tenants}


def test_every_query_of_every_load_is_accounted_for(scenario: Scenario) -> None:
    lines, counts = run(scenario)
    made = list(queries(scenario, 1))
    assert sum(counts.values()) == len(made)
    assert counts["web"] == sum(query.expiry_ns is not None for query in made)
    assert counts["vision"] == sum(query.tenant == "eye" for query in made)
    assert sum(line.count(b"QueryArrived(") for line in lines) == len(made)


def test_equal_seeds_give_equal_runs_and_others_do_not(scenario: Scenario) -> None:
    assert run(scenario, 3) == run(scenario, 3)
    assert run(scenario, 3)[0] != run(scenario, 4)[0]
    assert run(scenario, 3, noise=0.0)[0] != run(scenario, 3)[0]


def test_noise_may_have_a_seed_of_its_own(scenario: Scenario) -> None:
    def ends(noise_seed: int | None, noise: float = 0.2) -> tuple[list[list[int]], list[list[int]]]:
        found = run_scenario(scenario, PolicySection(), Assumptions(noise), 3, noise_seed=noise_seed)
        columns = [found.columns(name) for name in found.tenants]
        return [sorted(each.scheduled_ns.tolist()) for each in columns], [each.ended_ns.tolist() for each in columns]

    assert ends(3) == ends(None)
    assert ends(4)[0] == ends(3)[0]  # the same arrivals
    assert ends(4)[1] != ends(3)[1]
    assert ends(4, noise=0.0) == ends(3, noise=0.0)


def test_a_policy_that_never_stops_inside_a_model_runs_it_whole(scenario: Scenario) -> None:
    spans: set[tuple[int, int]] = set()

    def log(now: int, event: Event, actions: list[Action]) -> None:
        spans.update((a.work.start, a.work.end) for a in actions if isinstance(a, Launch) and a.work.tenant == "eye")

    run_scenario(scenario, PolicySection("edf", {"preempt": False}), Assumptions(), 1, log)
    assert spans == {(0, 4)}
    spans.clear()
    run_scenario(scenario, PolicySection("edf", {"preempt": True, "slack_share": 0.0}), Assumptions(), 1, log)
    assert spans >= {(0, 1), (1, 2), (2, 3), (3, 4)}


def test_without_drops_nothing_is_refused_but_what_timed_out(scenario: Scenario) -> None:
    outcomes = run_scenario(scenario, PolicySection("fcfs", {"drop": DropRule.NONE}), Assumptions(), 1)
    vision = outcomes.columns("vision")
    assert vision.completed.all()


def test_a_simulation_takes_no_more_than_the_rate_of_a_tenant(tmp_path: Path) -> None:
    write_model(tmp_path, "cnn", config("eye", slo_ms=200, more="max_rate = 2.0"), {1: residual_cnn})
    load = {"name": "vision", "model": "cnn", "rate": 5.0, "arrivals": "uniform"}
    spec = parse_workload({"seed": 4, "duration_s": 4.0, "tenant": [load]})
    limited = scenario_of(tmp_path, spec, PROFILE, TWO_LANES, "p50")
    outcomes = run_scenario(limited, PolicySection("fcfs", {"drop": DropRule.NONE}), Assumptions(), 1)
    assert sum(outcomes.columns("vision").completed) in (8, 9)  # 20 come in 4 s: a burst of two, and two a second


def latencies(scenario: Scenario, assumptions: Assumptions, **options: Any) -> dict[str, list[int]]:
    """Of the answered queries, by load."""
    outcomes = run_scenario(scenario, PolicySection("fcfs", {"drop": DropRule.NONE}), assumptions, 1, **options)
    columns = {name: outcomes.columns(name) for name in outcomes.tenants}
    return {name: sorted(each.latency_ns[each.completed].tolist()) for name, each in columns.items()}


@pytest.fixture
def sparse(tmp_path: Path) -> Scenario:
    """One query at a time, so that latencies can be told by hand."""
    write_model(tmp_path, "cnn", config("eye", slo_ms=60), {1: residual_cnn})
    load = {"name": "vision", "model": "cnn", "rate": 5.0, "arrivals": "uniform"}
    spec = parse_workload({"seed": 4, "duration_s": 1.0, "tenant": [load]})
    return scenario_of(tmp_path, spec, PROFILE, TWO_LANES, "p50")


def test_clients_see_the_wire_and_front_ends_take_their_share(sparse: Scenario) -> None:
    assert latencies(sparse, Assumptions()) == {"vision": [40 * MS] * 5}
    assert latencies(sparse, Assumptions(request_ns=3 * MS, response_ns=2 * MS)) == {"vision": [45 * MS] * 5}
    assert latencies(sparse, Assumptions(front_end_share=0.2)) == {"vision": [50 * MS] * 5}
    assert latencies(sparse, Assumptions(inflation={"eye": 1.5})) == {"vision": [60 * MS] * 5}
    assert latencies(sparse, Assumptions(decision_ns=MS, front_end_share=0.5)) == {"vision": [81 * MS] * 5}


def test_the_way_back_varies_by_a_seeded_factor(sparse: Scenario) -> None:
    wire = Assumptions(response_ns=4 * MS, response_noise=0.5)
    told = latencies(sparse, wire)
    assert told == latencies(sparse, wire)
    assert len(set(told["vision"])) == 5
    assert min(told["vision"]) > 40 * MS
    assert latencies(sparse, replace(wire, response_noise=0.0)) == {"vision": [44 * MS] * 5}


def test_a_query_is_late_when_the_client_says_so(sparse: Scenario) -> None:
    """The core answers within its SLO of 60 ms; the client counts from sending to receiving."""
    in_time = run_scenario(sparse, PolicySection(), Assumptions(response_ns=20 * MS), 1)
    assert {record.outcome for record in in_time.records()} == {Outcome.ANSWERED}
    for wire in ({"response_ns": 20 * MS + 1}, {"request_ns": 15 * MS, "response_ns": 6 * MS}):
        late = run_scenario(sparse, PolicySection(), Assumptions(**wire), 1)
        assert {record.outcome for record in late.records()} == {Outcome.LATE}


def test_launches_of_a_contended_memory_slow_each_other_down(tmp_path: Path) -> None:
    write_model(tmp_path, "cnn", config("eye", slo_ms=400), {1: residual_cnn})
    spec = Workload(tuple(TenantLoad(f"v{n}", "cnn", Trace((100 * MS,))) for n in range(2)), 1000 * MS)
    pair = scenario_of(tmp_path, spec, PROFILE, TWO_LANES, "p50")
    traffic = {"eye": Traffic((0,) * 4, ((100 * MS,) * 4,))}  # 400 MB in 40 ms: 10 GB/s
    told = latencies(pair, Assumptions(), contention=Contention(10**10, None, traffic))
    assert told == {"v0": [80 * MS], "v1": [80 * MS]}
    assert latencies(pair, Assumptions(), contention=Contention(2 * 10**10, None, traffic))["v0"] == [40 * MS]


class Watcher:
    """Doubles what is believed of the eye at its first launch, and remembers what it was told."""

    def __init__(self, scenario: Scenario) -> None:
        self.predictor = TablePredictor(scenario.tables)
        self.kinds: list[str] = []
        self.delays_ns: list[int] = []

    def replied(self, delay_ns: int) -> None:
        self.delays_ns.append(delay_ns)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: None) -> Event | None:
        self.kinds.append(type(event).__name__)
        ended = self.kinds.count("LaunchEnded") == 1 and isinstance(event, LaunchEnded)
        return PredictorChanged(self.predictor.scaled({"eye": 2.0})) if ended else None


def test_a_follower_is_told_everything_and_may_change_the_belief(sparse: Scenario) -> None:
    logged: list[str] = []
    beliefs: list[int] = []

    def log(now: int, event: Event, actions: list[Action]) -> None:
        logged.append(type(event).__name__)
        beliefs.extend(action.predicted_ns for action in actions if isinstance(action, Launch))

    watcher = Watcher(sparse)
    outcomes = run_scenario(sparse, PolicySection(), Assumptions(), 1, log, follower=watcher)
    assert logged == watcher.kinds
    assert logged.count("PredictorChanged") == 1
    assert logged[logged.index("LaunchEnded") + 1] == "PredictorChanged"
    assert beliefs == [40 * MS, 80 * MS, 80 * MS]  # with 80 ms believed and 60 ms allowed, others run as probes alone
    counts = Counter(record.outcome for record in outcomes.records())
    assert counts == {Outcome.ANSWERED: 3, Outcome.REJECTED: 2}


def test_a_follower_hears_of_answers_when_they_are_written(sparse: Scenario) -> None:
    watcher = Watcher(sparse)
    assumptions = Assumptions(response_ns=8 * MS, reply_share=0.5)
    run_scenario(sparse, PolicySection(), assumptions, 1, follower=watcher)
    assert watcher.delays_ns == [4 * MS] * 3
    silent = Watcher(sparse)
    run_scenario(sparse, PolicySection(), Assumptions(), 1, follower=silent)
    assert silent.delays_ns == []


@pytest.mark.parametrize("policy", ["edf", "sjf"])
def test_a_simulation_learns_the_margin_that_a_server_would(scenario: Scenario, policy: str) -> None:
    """By the class that the server has: spreads of noisy launches, the way of answers twice; none in a plain order."""
    many = replace(scenario, workload=parse_workload({**WORKLOAD, "duration_s": 60.0}))
    beliefs = many.online_model(many.policy(PolicySection(policy)))
    run_scenario(many, PolicySection(policy), Assumptions(noise=0.3, response_ns=4 * MS), 1, follower=beliefs)
    margin = beliefs.predictor.margin
    if policy == "sjf":
        assert margin == NO_MARGIN
        return
    assert margin.spreads["eye"].factor == pytest.approx(exp(1.645 * 0.3), rel=0.35)
    assert margin.reply_ns == pytest.approx(2 * 4 * MS, rel=0.35)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reply_share": 1.5}, "reply_share is 1.5, expected a share up to 1"),
        ({"noise": -0.1}, "noise is -0.1"),
        ({"request_ns": -1}, "request_ns is -1"),
        ({"front_end_share": 1.0}, "front_end_share is 1.0, expected a share below 1"),
        ({"inflation": {"eye": 0.0}}, "inflation of 'eye' is 0.0"),
    ],
)
def test_assumptions_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        Assumptions(**wrong)


def test_a_model_without_a_profile_is_named(tmp_path: Path, scenario: Scenario) -> None:
    with pytest.raises(ConfigError, match=r"model 'cnn' has no profile: run 'cotenant profile"):
        scenario_of(
            tmp_path,
            workload(),
            Profile(this_device(), "", "", {"add_sub": PROFILE.models["add_sub"]}),
            ONE_LANE,
            "p50",
        )


class Crowding(FittedGroups):
    """Every group takes so many times as long as its longest member alone."""

    key, quantile = "crowding", 0.95

    def __init__(self, scenario: Scenario, times: float) -> None:
        self._alone, self._times = TablePredictor(scenario.tables), times

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        return [round(self._times * max([self._alone.latency_ns(*member) for member in group])) for group in groups]


@pytest.mark.skipif(not known("duty_cycle"), reason="the package of partitions is not here")
@pytest.mark.parametrize("times", [1.0, 1.5])
def test_groups_of_a_plan_are_believed_and_played_as_they_were_measured(scenario: Scenario, times: float) -> None:
    pair = (Slot("add_sub", 4, 40.0, 1, 1), Slot("eye", 1, 8.0, 1, 1))
    made = replace(
        scenario,
        lanes=ONE_LANE,
        plans={"rounds": (Round(100 * MS, pair),)},
        groups=Crowding(scenario, times),
        plays_groups=True,
    )
    launches: dict[int, list[Launch]] = {}
    took: dict[int, int] = {}
    began: dict[int, int] = {}

    def log(now: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, LaunchEnded):
            took[event.launch] = now - began[event.launch]
        for each in actions:
            if isinstance(each, Launch):
                launches.setdefault(group_of(each), []).append(each)
                began[each.id] = now

    run_scenario(made, PolicySection("duty_cycle", {"drop": DropRule.NONE}), Assumptions(), 1, log)
    groups = [group for group in launches.values() if len(group) > 1]
    assert groups
    longest = TablePredictor(made.tables)
    for group in groups:
        expected = round(times * max([longest.latency_ns(each.work, 1) for each in group]))
        assert {each.predicted_ns for each in group} == {expected}
        assert {took[each.id] for each in group} == {expected}
        assert {each.share for each in group} == set(TWO_LANES)


SHAPES = "[[model.shapes]]\nx = [1, 4]\n[[model.shapes]]\nx = [1, 8]\n"


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("items", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", [0, 1, 2])
@pytest.mark.parametrize("declared", [0, 2])
def test_what_the_server_would_refuse_is_refused_by_simulator_and_load_generator_alike(
    tmp_path: Path, max_batch: int, items: int, shape: int, declared: int
) -> None:
    text = config(max_batch=max_batch, slo_ms=50)
    write_model(tmp_path, "add_sub", text + (SHAPES if declared else ""), {1: add_sub})
    load = TenantLoad("web", "add_sub", Poisson(1.0), items=items, shape=shape)
    told = json.dumps([{"x": [-1, 4 * (at + 1)]} for at in range(declared)])
    about = {"max_batch_size": max_batch, "parameters": {"shapes": {"string_value": told}}}
    inputs = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]}

    def reason(ask: Callable[[], object]) -> str | None:
        try:
            ask()
        except (ConfigError, LoadError) as error:
            return str(error)
        return None

    simulated = reason(lambda: scenario_of(tmp_path, Workload((load,), 1000 * MS), PROFILE, ONE_LANE, "p50"))
    sent = reason(lambda: sample_pool(load, ModelInfo(inputs, about), np.random.default_rng(1), 1))
    assert simulated == sent
    assert (sent is not None) == (items > max_batch or shape >= max(1, declared))
    if sent is not None:
        assert sent.startswith("tenant 'web': items is" if items > max_batch else "tenant 'web': shape is")
