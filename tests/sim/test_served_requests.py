"""Requests in a simulated server: the queues before the scheduler, and the cores that they take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

import cotenant
from cotenant.profiles.profile_file import save_profile
from cotenant.profiles.server_cost import (
    GRPC,
    HTTP,
    PROTOCOLS,
    ProcessCost,
    RequestCost,
    RequestRate,
    ServerCost,
    busy,
    overload,
)
from cotenant.repository import profile_path
from cotenant.sim.served_requests import MOST_TAKEN, ServedRequests, Way
from cotenant.workload import parse_workload
from repositories import write_good

US = 1000
SMALL = (0, 0)


def cost(front_us: int = 100, engine_us: int = 50, *, front_ends: int = 1, alone_us: int = 400) -> ServerCost:
    front_end = ProcessCost(front_us * US, 1024.0, 2048.0)
    request = RequestCost(front_end, ProcessCost(engine_us * US), ProcessCost(0), 1, 1, alone_us * US)
    return ServerCost(front_ends, {HTTP: request, GRPC: request}, 20 * US, 10 * US)


def test_a_large_request_costs_its_kibibytes() -> None:
    assert ProcessCost(5, 1024.0, 2048.0).of((10, 100)) == 5 + 10 + 200


def test_a_lone_request_takes_the_processor_times_and_the_rest_of_its_latency() -> None:
    workload = parse_workload({"duration_s": 1.0, "tenant": [{"model": "a", "rate": 5.0}]})
    requests = ServedRequests(cost(), {"a": SMALL}, 2)
    way = requests.way(workload, 1, 1)
    assert way.enter(0, 1000) == (1000, pytest.approx(1000 + 150 * US, rel=0.01))
    assert requests.later_ns(HTTP) == (400 - 150 - 30) * US


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 300)), min_size=1, max_size=40),
    st.integers(1, 3),
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
)
def test_queues_serve_in_order_one_request_at_a_time(
    gaps: list[tuple[int, int]], front_ends: int, times: tuple[int, int]
) -> None:
    front, engine = times
    way = Way([(front, engine), (2 * front, engine)], front_ends)
    now, free, last = 0, [0] * front_ends, 0
    for position, gap in gaps:
        now += gap
        begun, reached = way.enter(position, now)
        assert begun == max(now, min(free))  # a front-end that is free, as soon as one is
        free[free.index(min(free))] = begun + front * (position + 1)
        assert reached == max(last, begun + front * (position + 1)) + engine
        last = reached


@pytest.mark.parametrize(("rate", "expected"), [(5000.0, ""), (9000.0, "--frontends 2")])
def test_what_is_too_much_for_one_front_end_is_said(rate: float, expected: str) -> None:
    demands = [RequestRate(HTTP, rate / 2, SMALL), RequestRate(GRPC, rate / 2, SMALL)]
    assert busy(cost(), demands)["front_end"] == pytest.approx(rate * 1e-4)
    assert expected in (found := overload(cost(), demands))
    assert bool(found) == bool(expected)
    assert overload(cost(front_ends=2), demands) == ""


def test_more_than_an_engine_can_do_is_said() -> None:
    assert "the engine" in overload(cost(1, 100), [RequestRate(HTTP, 9000.0, SMALL)])


def test_requests_use_cores_outside_the_lanes_first() -> None:
    workload = parse_workload({"duration_s": 10.0, "seed": 1, "tenant": [{"model": "a", "rate": 5000.0}]})
    load = ServedRequests(cost(), {"a": SMALL}, 2).load(workload, 1, 2)
    assert load.lanes_share == pytest.approx(0.75 / 2, rel=0.02)
    assert ServedRequests(cost(), {"a": SMALL}, 3).load(workload, 1, 2).lanes_share == 0.0
    assert ServedRequests(cost(2000, 2000), {"a": SMALL}, 1).load(workload, 1, 1).lanes_share == MOST_TAKEN
    assert "0.50" in load.text


def test_a_bound_counts_the_measured_cost_of_launches(tmp_path: Path) -> None:
    root = write_good(tmp_path / "models", "add_sub")
    profile = cotenant.profile(root, budget_s=0.0, settings={"device.cores": [0]})
    request = RequestCost(ProcessCost(10 * US), ProcessCost(10 * US), ProcessCost(0), 1, 1, 100 * US)
    slow = ServerCost(1, dict.fromkeys(PROTOCOLS, request), 3000 * US, 1000 * US)
    workload = {"duration_s": 2.0, "seed": 1, "tenant": [{"model": "add_sub", "rate": 20.0}]}
    paces = {}
    for name, server in (("free", UNSET), ("measured", slow)):
        save_profile(profile_path(root), replace(profile, server=server))
        chosen = {} if name == "measured" else {"decision_us": 4000.0}
        run = cotenant.simulate(workload, root, settings={"device.cores": [0]}, noise=0.0, bound=True, **chosen)
        assert run.bound is not None
        [paces[name]] = [each.pace for each in run.bound.tenants]
        assert (run.server is None) == (name == "free")
    assert paces["free"] > 10
    assert paces["measured"] == pytest.approx(1.0, abs=0.05)
