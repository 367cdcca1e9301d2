from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
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
from cotenant.workload.arrivals import _draw
from cotenant.workload.spec import MOST_QUERIES

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


# --- anything in its range ends ---------------------------------------------------------------------------------------


def anything(random: Random) -> ArrivalProcess:
    """A process of any kind, with numbers from all over the ranges that are allowed."""

    def number(least: float = -12) -> float:
        return float(10 ** random.uniform(random.choice([least, -300]), 12))

    count = random.randint(2, 4)
    made = random.choice(
        [
            lambda: Poisson(number()),
            lambda: Uniform(number()),
            lambda: Gamma(number(), number()),
            lambda: Gamma(number(), random.uniform(0.1, 1000)),
            lambda: Mmpp(tuple(number() for _ in range(count)), tuple(number() for _ in range(count))),
            lambda: Trace(tuple(sorted(random.randint(0, 10 ** random.randint(1, 25)) for _ in range(9))), number()),
        ]
    )
    return made()


def test_a_workload_of_any_numbers_is_refused_or_ends() -> None:
    """Refused by the number of queries, in a sentence that names the tenant; else every stream ends with the run."""
    random, refused, ended = Random(1), 0, 0
    for _ in range(400):
        process, duration_ns = anything(random), round(10 ** random.uniform(-6, 9) * 1e9)
        if 1e5 < process.expected(duration_ns / 1e9) <= MOST_QUERIES:
            continue  # they end, too, after a while
        loads = (TenantLoad("one", "m", process),)
        if process.expected(duration_ns / 1e9) > MOST_QUERIES:
            with pytest.raises(InvalidValueError, match=r"of tenant 'one' .* at most 100,000,000"):
                Workload(loads, duration_ns)
            refused += 1
            continue
        made = Workload(loads, duration_ns)
        last = 0
        for block in arrival_blocks(made):
            assert last <= block.time_ns[0]
            assert (np.diff(block.time_ns) >= 0).all()
            assert (last := block.time_ns[-1]) < duration_ns
        ended += 1
    assert min(refused, ended) > 50


def numbers(least: float, most: float = 1e12) -> st.SearchStrategy[float]:
    """Numbers all over a range, of any size."""
    return st.one_of(st.floats(least, most), st.floats(-300, 12).map(lambda at: min(most, max(least, 10**at))))


def processes() -> st.SearchStrategy[ArrivalProcess]:
    """Processes of any kind, with numbers from all over the ranges that are allowed, their ends included."""
    positive = numbers(5e-324)
    states = st.lists(st.tuples(numbers(0.0), positive), min_size=2, max_size=5).filter(lambda found: max(found)[0] > 0)
    times = st.lists(st.integers(0, 10**25), min_size=1, max_size=9).map(sorted)
    return st.one_of(
        st.builds(Poisson, positive),
        st.builds(Uniform, positive),
        st.builds(Gamma, positive, positive),
        states.map(lambda found: Mmpp(tuple(rate for rate, _ in found), tuple(dwell for _, dwell in found))),
        st.builds(lambda found, scale: Trace(tuple(found), scale), times, positive),
    )


@settings(max_examples=300)
@example(process=Mmpp((2e7, 0.7), (0.4, 1e-8)), duration_ns=10)
@example(process=Mmpp((0.0, 1e5, 0.0), (0.5, 0.02, 0.48)), duration_ns=10**9)
@given(process=processes(), duration_ns=st.one_of(st.integers(1, 10**18), st.integers(0, 18).map(lambda at: 10**at)))
def test_streams_end_after_a_bounded_number_of_steps(process: ArrivalProcess, duration_ns: int) -> None:
    """Whatever the numbers: a workload is refused, or its stream makes no more blocks than its queries need."""
    loads, expected = (TenantLoad("one", "m", process),), process.expected(duration_ns / 1e9)
    if expected > MOST_QUERIES:
        with pytest.raises(InvalidValueError, match="number of queries"):
            Workload(loads, duration_ns)
        return
    made = Workload(loads, duration_ns)
    if isinstance(process, Mmpp):  # however rare a state is, the run may lie in it
        expected = max(expected, max(process.rates) * duration_ns / 1e9)
    if expected > 1e6:
        return  # they end, too, after a while
    for steps, block in enumerate(_draw(process, np.random.default_rng(1), duration_ns / 1e9), 1):
        assert steps <= 100 + expected / 10
        assert block.min(initial=0) >= 0
        assert block.size <= 10 * (8192 + expected)
    sent = sum(block.time_ns.size for block in arrival_blocks(made, 1))
    assert sent <= 100 + 20 * expected


def test_states_of_many_arrivals_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["cotenant.workload.arrivals"], "_MANY", 10_000)
    process, duration_s = Mmpp((40.0, 0.0), (1e9, 1e-3)), 10_000
    blocks = list(_draw(process, np.random.default_rng(3), float(duration_s)))
    times = np.concatenate(blocks)
    assert max(block.size for block in blocks) < 11_000
    assert (np.diff(times) >= 0).all()
    assert times[-1] <= duration_s * S
    assert times.size == pytest.approx(40 * duration_s, rel=0.01)


@pytest.mark.parametrize("rate", [1e-7, 1e-12, 1e-300, 5e-324])
@pytest.mark.parametrize(
    "kind", [Poisson, Uniform, lambda rate: Gamma(rate, 3.0), lambda rate: Mmpp((rate, 0), (1, 2))]
)
def test_nearly_nothing_is_sent_and_that_ends(kind: Callable[[float], ArrivalProcess], rate: float) -> None:
    assert len(list(arrivals(Workload((TenantLoad("a", "a", kind(rate)),), 100 * S)))) <= 1


def test_all_tenants_together_count() -> None:
    each = MOST_QUERIES / 10 * 0.9
    tenants = tuple(TenantLoad(name, "m", Poisson(each)) for name in "abc")
    assert Workload(tenants, 3 * S).mean_rate == pytest.approx(3 * each)
    with pytest.raises(InvalidValueError, match="up to those of tenant 'c' over 4 s: number of queries is 108000000"):
        Workload(tenants, 4 * S)
    with pytest.raises(InvalidValueError, match="number of queries"):
        scale(Workload(tenants, S), 100)


def test_a_state_that_lasts_for_years_does_not_draw_for_years() -> None:
    process = Mmpp((1000.0, 0.0), (1e9, 1e6))
    found = list(arrivals(Workload((TenantLoad("a", "a", process),), 10 * S), seed=1))
    assert 9_500 < len(found) < 10_500
