from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.workload import (
    ArrivalProcess,
    Gamma,
    Mmpp,
    Poisson,
    TenantLoad,
    Trace,
    Uniform,
    Workload,
    arrival_blocks,
    arrivals,
    for_capacity,
    scale,
    with_rates,
)

S = 1_000_000_000
PROCESSES: list[ArrivalProcess] = [
    Poisson(20.0),
    Gamma(30.0, 2.0),
    Mmpp((5.0, 50.0), (4.0, 1.0)),
    Uniform(10.0),
    Trace((0, 2, 2, 5 * S, 9 * S), 2.0),
]


def workload(*processes: ArrivalProcess, duration_s: float = 30.0, seed: int = 1) -> Workload:
    tenants = tuple(TenantLoad(f"t{i}", "m", process) for i, process in enumerate(processes))
    return Workload(tenants, round(duration_s * S), seed=seed)


def times_s(process: ArrivalProcess, duration_s: float, seed: int = 1) -> np.ndarray:
    blocks = list(arrival_blocks(workload(process, duration_s=duration_s, seed=seed)))
    return np.concatenate([np.empty(0, np.int64), *(block.time_ns for block in blocks)]) / S


def test_poisson_gaps_are_exponential() -> None:
    """Kolmogorov-Smirnov distance against 1 - exp(-rate t); 1.63 / sqrt(n) is the bound at 1 %."""
    gaps = np.sort(np.diff(times_s(Poisson(100.0), 500)))
    cdf = 1 - np.exp(-100.0 * gaps)
    ranks = np.arange(1, gaps.size + 1) / gaps.size
    distance = max(np.abs(cdf - ranks).max(), np.abs(cdf - ranks + 1 / gaps.size).max())
    assert distance < 1.63 / np.sqrt(gaps.size)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gamma_has_the_mean_and_the_variation_asked_for(cv: float) -> None:
    gaps = np.diff(times_s(Gamma(200.0, cv), 1000))
    assert gaps.mean() == pytest.approx(1 / 200, rel=5 * cv / np.sqrt(gaps.size))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_mmpp_mean_is_weighted_by_dwell_and_its_states_show() -> None:
    process = Mmpp((5.0, 50.0, 0.0), (0.4, 0.1, 0.5))
    assert process.mean_rate == pytest.approx((5 * 0.4 + 50 * 0.1) / 1.0)
    times = times_s(process, 20_000)
    assert times.size / 20_000 == pytest.approx(process.mean_rate, rel=0.03)
    counts = np.bincount(times.astype(np.int64), minlength=20_000)
    assert counts.var() / counts.mean() > 2  # a Poisson process has 1


def test_mmpp_starts_in_its_stationary_state() -> None:
    """With dwell 3:1 a quarter of all runs start in the silent state (within three standard deviations)."""
    starts = [times_s(Mmpp((1000.0, 0.0), (30.0, 10.0)), 0.05, seed=seed).size > 0 for seed in range(400)]
    assert np.mean(starts) == pytest.approx(0.75, abs=3 * np.sqrt(0.75 * 0.25 / 400))


def test_uniform_gaps_are_constant() -> None:
    times = times_s(Uniform(128.0), 200)
    assert times.size in (25_599, 25_600, 25_601)
    np.testing.assert_allclose(np.diff(times), 1 / 128, atol=2e-9)
    assert 0 <= times[0] < 1 / 128


def test_trace_is_replayed_at_its_scale_and_cut_at_the_end() -> None:
    assert times_s(Trace((0, 1 * S, 4 * S, 9 * S), 2.0), 4).tolist() == [0.0, 0.5, 2.0]


def test_a_trace_of_one_burst_comes_through() -> None:
    assert times_s(Trace((0,) * 100_000), 30).size == 100_000


@pytest.mark.parametrize("process", PROCESSES[:4])
def test_mean_rate_holds(process: ArrivalProcess) -> None:
    assert times_s(process, 20_000).size / 20_000 == pytest.approx(process.mean_rate, rel=0.03)


def test_merged_in_total_order_and_numbered_per_tenant() -> None:
    found = list(arrivals(workload(*PROCESSES, Trace((0, 1, 1)))))
    assert found == sorted(found)
    assert found[:6] == [(0, 4, 0), (0, 5, 0), (1, 4, 1), (1, 4, 2), (1, 5, 1), (1, 5, 2)]
    for tenant in range(6):
        assert [a.seq for a in found if a.tenant == tenant] == list(range(sum(a.tenant == tenant for a in found)))
    assert all(type(value) is int for value in found[0])


def test_same_seed_same_arrivals_other_seed_other_arrivals() -> None:
    load = workload(*PROCESSES)
    assert list(arrivals(load)) == list(arrivals(load)) == list(arrivals(load, seed=1))
    assert list(arrivals(load)) != list(arrivals(load, seed=2))


def test_a_tenant_added_at_the_end_changes_no_other() -> None:
    before = list(arrivals(workload(*PROCESSES)))
    after = list(arrivals(workload(*PROCESSES, Poisson(5000.0))))
    assert [a for a in after if a.tenant < len(PROCESSES)] == before


def test_a_longer_run_starts_like_a_shorter_one() -> None:
    short = list(arrivals(workload(*PROCESSES, duration_s=10)))
    longer = arrivals(workload(*PROCESSES, duration_s=1000))
    assert list(itertools.takewhile(lambda a: a.time_ns < 10 * S, longer)) == short


def test_scale_multiplies_every_rate() -> None:
    load = workload(*PROCESSES)
    twice = scale(load, 2.0)
    for old, new in zip(load.tenants, twice.tenants, strict=True):
        assert new.process.mean_rate == pytest.approx(2 * old.process.mean_rate)


@given(
    service_ms=st.lists(st.floats(0.01, 1000), min_size=1, max_size=8),
    cores=st.integers(1, 64),
    load=st.floats(0.1, 3),
)
def test_capacity_is_shared_equally(service_ms: list[float], cores: int, load: float) -> None:
    service_ns = {f"m{i}": ms * 1e6 for i, ms in enumerate(service_ms)}
    rates = for_capacity(service_ns, cores, load)
    work = [rates[model] * service_ns[model] / S for model in service_ns]
    assert sum(work) == pytest.approx(load * cores)
    assert max(work) == pytest.approx(min(work))


def test_with_rates_keeps_burstiness() -> None:
    load = Workload((TenantLoad("a", "m", Gamma(10.0, 3.0)), TenantLoad("b", "n", Poisson(1.0))), S)
    changed = with_rates(load, {"m": 40.0})
    assert changed.tenants[0].process == Gamma(40.0, 3.0)
    assert changed.tenants[1] == load.tenants[1]
    with pytest.raises(InvalidValueError, match="models of the workload"):
        with_rates(load, {"z": 1.0})
