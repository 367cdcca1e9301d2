"""One brain: the simulator and the server's driver write the same log, byte for byte, from the same workload."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.core.snapshot import DropRule, Policy
from cotenant.policies import policy_class, policy_names
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.work import Share
from parity import COUNT, served, simulated, workload
from scenario import MS, ONE_LANE, TWO_LANES, policy_of

MODES = list(
    itertools.product(policy_names(), list(DropRule), [ONE_LANE, TWO_LANES], [(False, 0.1), (True, 0.0), (True, 0.2)])
)


@pytest.mark.parametrize(
    ("name", "drop", "lanes", "cut"),
    MODES,
    ids=[f"{name}-{drop}-{len(lanes)}-{'cut' if cut[0] else 'whole'}{cut[1]}" for name, drop, lanes, cut in MODES],
)
def test_simulator_and_server_write_the_same_log(
    name: str, drop: DropRule, lanes: tuple[Share, ...], cut: tuple[bool, float]
) -> None:
    policy = policy_of(name, lanes, drop, *cut)
    for number, world in enumerate(({}, {"noise": 0.3, "seed": 5}, {"noise": 0.1, "failure_rate": 0.1, "seed": 6})):
        queries = workload(seed=number, gap_ns=(7 if len(lanes) == 2 else 10) * MS)
        lines, told = simulated(policy, queries, **world)
        other_lines, other_told = served(policy, queries, **world)
        assert other_lines == lines
        assert other_told == told
        assert sorted(number for number, _, _ in told) == list(range(COUNT))


@pytest.mark.parametrize("drop", list(DropRule))
def test_groups_that_are_enqueued_start_when_they_can(drop: DropRule) -> None:
    policy = Overlap(TWO_LANES, drop, enqueue_ms=1000.0)
    queries = workload(seed=3, gap_ns=7 * MS)
    lines, told = simulated(policy, queries, noise=0.1, failure_rate=0.1, seed=6)
    assert served(policy, queries, noise=0.1, failure_rate=0.1, seed=6) == (lines, told)
    assert sum(b'["Enqueue"' in line for line in lines) > 10


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    gap_ms=st.integers(1, 30),
    grid_ms=st.sampled_from([1, 2, 5]),
    policy=st.builds(
        policy_of,
        st.sampled_from(policy_names()),
        st.sampled_from([ONE_LANE, TWO_LANES]),
        st.sampled_from(list(DropRule)),
        st.booleans(),
        st.sampled_from([0.0, 0.1, 1.0]),
    ),
)
def test_coinciding_events_have_one_order(seed: int, gap_ms: int, grid_ms: int, policy: Policy) -> None:
    """Latencies, arrivals and time-outs on one coarse grid: nearly all events happen at the instant of another."""
    queries = workload(seed, gap_ms * MS, grid_ms * MS)
    assert served(policy, queries) == simulated(policy, queries)


def test_the_workload_shows_every_outcome_and_coinciding_events() -> None:
    """A parity of empty logs would prove nothing."""
    lines, told = simulated(policy_class("edf")(ONE_LANE), workload(2, 7 * MS), failure_rate=0.1, seed=1)
    outcomes = {respond.outcome.value for _, respond, _ in told}
    assert {"answered", "rejected", "dropped", "failed"} <= outcomes
    lines, told = simulated(policy_class("fcfs")(ONE_LANE, DropRule.NONE), workload(2, 8 * MS, 5 * MS))
    assert "late" in {respond.outcome.value for _, respond, _ in told}
    times = [line.split(b",", 1)[0] for line in lines]
    assert len(set(times)) < 0.9 * len(times)
