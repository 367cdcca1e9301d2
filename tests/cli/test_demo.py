"""The workload of the demo: it asks for the load that was wanted, and for no more than the cap of any model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.cli.quick_start import (
    CLIENT_COST_NS,
    CONTENDERS,
    MOST_RATE,
    MOST_TRIES,
    demo_workload,
    latency_targets_ms,
    with_retries,
)
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile
from cotenant.wire.api import Array
from cotenant.wire.encode import ClientError
from cotenant.workload import parse_workload, to_toml

MS = 1_000_000


def profile_of(latencies_ns: dict[str, int]) -> Profile:
    """Each model alone, and points at which it would be something else."""
    models = {
        name: ModelProfile(
            "",
            (
                Point(0, 1, 2, 9, 1, 1, 1, 1),
                Point(0, 1, 1, 9, ns, ns, ns, ns),
                Point(0, 4, 1, 9, 4 * ns, 4 * ns, 4 * ns, 4 * ns),
                Point(1, 1, 1, 9, 1, 1, 1, 1),
            ),
            (1,),
            (0, 1),
            1.0,
        )
        for name, ns in latencies_ns.items()
    }
    return Profile(this_device(), "", "", models)


def load_of(workload: object, latencies_ns: dict[str, int]) -> float:
    return sum(
        tenant.process.mean_rate * (latencies_ns[tenant.model] + CLIENT_COST_NS) / 1e9
        for tenant in workload.tenants  # type: ignore[attr-defined]
    )


@given(
    latencies=st.lists(st.integers(MS // 10, 2000 * MS), min_size=1, max_size=8),
    cores=st.integers(1, 64),
    load=st.floats(0.1, 4),
)
def test_rates_respect_the_cap_and_ask_for_the_load(latencies: list[int], cores: int, load: float) -> None:
    latencies_ns = {f"m{position}": ns for position, ns in enumerate(latencies)}
    models = tuple(latencies_ns)
    workload = demo_workload(profile_of(latencies_ns), models, cores, load, 5.0)
    rates = {tenant.name: tenant.process.mean_rate for tenant in workload.tenants}
    assert tuple(rates) == models
    assert all(0 < rate <= MOST_RATE * (1 + 1e-9) for rate in rates.values())
    asked = load_of(workload, latencies_ns)
    if all(rate >= MOST_RATE * (1 - 1e-9) for rate in rates.values()):
        assert asked <= load * cores * (1 + 1e-6)  # every model is at its cap: more cannot be asked for
    else:
        assert asked == pytest.approx(load * cores, rel=1e-6)


def test_the_work_is_shared_equally_where_rates_allow() -> None:
    latencies_ns = {"slow": 98 * MS, "medium": 48 * MS, "tiny": 1 * MS}
    workload = demo_workload(profile_of(latencies_ns), tuple(latencies_ns), 2, 1.0, 5.0)
    rates = {tenant.name: tenant.process.mean_rate for tenant in workload.tenants}
    assert rates["tiny"] == MOST_RATE
    assert rates["slow"] * 0.1 == pytest.approx(rates["medium"] * 0.05) == pytest.approx((2.0 - 40 * 0.003) / 2)


def test_slos_are_what_the_machine_can_do() -> None:
    """Five times the latency alone at the largest shape, and never less than two stretches, or 20 ms."""
    profile = profile_of({"slow": 61 * MS, "tiny": MS // 10})
    large = Point(2, 1, 1, 9, 123 * MS, 1, 1, 1)
    wide = replace(profile.models["slow"], points=(*profile.models["slow"].points, large))
    models = profile.models | {"large": replace(wide, unit_ns=(3 * MS, 8 * MS, 9 * MS), cuts=(0, 1, 3))}
    assert latency_targets_ms(replace(profile, models=models)) == {"slow": 300, "tiny": 34, "large": 620}
    assert latency_targets_ms(profile_of({"tiny": MS // 10})) == {"tiny": 20}
    twice = {name: model.points for name, model in profile_of({"slow": 122 * MS}).models.items()}
    assert latency_targets_ms(replace(profile, models={"slow": replace(wide, points=twice["slow"])})) == {"slow": 610}


def test_both_protocols_are_used_and_the_file_says_the_same() -> None:
    latencies_ns = {"a": 50 * MS, "b": 20 * MS, "c": 10 * MS}
    workload = demo_workload(profile_of(latencies_ns), tuple(latencies_ns), 2, 1.3, 7.5)
    assert [tenant.protocol for tenant in workload.tenants] == ["http", "grpc", "http"]
    assert workload.duration_ns == 7_500_000_000

    assert parse_workload(tomllib.loads(to_toml(workload))) == workload


def test_what_is_refused_is_asked_again_and_not_for_ever() -> None:
    refusals, asked = [3], [0]

    def ask(model: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        asked[0] += 1
        if refusals[0]:
            refusals[0] -= 1
            raise ClientError(f"{model} is refused")
        return dict(inputs)

    given = {"x": np.ones(3)}
    assert with_retries(ask)("m", given) == given
    assert asked == [4]
    refusals[0], asked[0] = 1000, 0
    with pytest.raises(ClientError, match="m is refused"):
        with_retries(ask)("m", given)
    assert asked == [MOST_TRIES]


def test_the_contenders_are_what_serve_takes() -> None:
    assert [contender.arguments for contender in CONTENDERS] == [
        ("--policy", "fcfs", "--drop", "none"),
        ("--policy", "shares", "--drop", "hopeless"),
    ]
