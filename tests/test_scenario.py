"""Simulating a repository's models: its tenants, its profile, and the queries that a server would have made."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.config import PolicySection
from cotenant.core.actions import Action, Launch
from cotenant.core.events import Event
from cotenant.core.snapshot import DropRule
from cotenant.errors import ConfigError
from cotenant.profile.device import this_device
from cotenant.profile.table import ModelProfile, Point, Profile
from cotenant.sim.scenario import Assumptions, Scenario, queries, run_scenario, scenario_of
from cotenant.types import priority_rank
from cotenant.workload import Workload, parse_workload
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
    assert (small.name, small.slo_ns, small.max_batch, small.cuts) == ("add_sub", 50 * MS, 4, (0, 1))
    assert (eye.name, eye.priority, eye.weight, eye.cuts) == ("eye", 2, 3.0, (0, 1, 2, 3, 4))
    assert scenario.owners == (small, small, eye)
    assert scenario.cores == (0, 1)
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
    assert {(query.rank, query.deadline_ns - query.arrival_ns) for query in vision} == {(priority_rank(2), 200 * MS)}
    batch = [query for query in made if query.tenant == "add_sub" and query.expiry_ns is None]
    assert {query.items for query in batch} == {2}
    assert list(queries(scenario)) == made
    assert list(queries(scenario, 5)) != made


def run(scenario: Scenario, seed: int = 1, noise: float = 0.2, **policy: object) -> tuple[list[bytes], dict[str, int]]:
    lines: list[bytes] = []

    def log(now: int, event: Event, actions: list[Action]) -> None:
        lines.append(repr((now, event, actions)).encode())

    outcomes = run_scenario(scenario, PolicySection(**policy), Assumptions(noise, 50_000), seed, log)  # type: ignore[arg-type]
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


def test_a_policy_that_never_stops_inside_a_model_runs_it_whole(scenario: Scenario) -> None:
    spans: set[tuple[int, int]] = set()

    def log(now: int, event: Event, actions: list[Action]) -> None:
        spans.update((a.start, a.end) for a in actions if isinstance(a, Launch) and a.tenant == "eye")

    run_scenario(scenario, PolicySection(preempt=False), Assumptions(), 1, log)
    assert spans == {(0, 4)}
    spans.clear()
    run_scenario(scenario, PolicySection(preempt=True, stretch=0.0), Assumptions(), 1, log)
    assert spans >= {(0, 1), (1, 2), (2, 3), (3, 4)}


def test_without_drops_nothing_is_refused_but_what_timed_out(scenario: Scenario) -> None:
    outcomes = run_scenario(scenario, PolicySection(name="fcfs", drop=DropRule.NONE), Assumptions(), 1)
    vision = outcomes.columns("vision")
    assert vision.completed.all()


def test_a_model_without_a_profile_is_named(tmp_path: Path, scenario: Scenario) -> None:
    with pytest.raises(ConfigError, match=r"model 'cnn' has no profile: run 'cotenant profile"):
        scenario_of(
            tmp_path,
            workload(),
            Profile(this_device(), "", "", {"add_sub": PROFILE.models["add_sub"]}),
            ONE_LANE,
            "p50",
        )
