"""What tenants are entitled to: shares, virtual clocks, and what is remembered of attainments."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.fair_queues import FairQueues
from cotenant.errors import InvalidValueError
from cotenant.types import Outcome, Query, Tenant

SOME = settings(max_examples=100, deadline=None, database=None)


def accounts(*tenants: Tenant, lanes: int = 2, row: int = 1, now: int = 0) -> FairQueues:
    made = FairQueues()
    made.set_quotas(tenants, lanes, lambda tenant: row, now)
    return made


def query(number: int, tenant: str, now: int, slo: int) -> Query:
    return Query(number, tenant, now, now + slo)


def test_what_named_shares_leave_is_dealt_by_weight() -> None:
    made = accounts(Tenant("a", 9, share=0.4), Tenant("b", 9, weight=2), Tenant("c", 9))
    assert [account.share for account in made.known.values()] == pytest.approx([0.4, 0.4, 0.2])


def test_shares_above_the_whole_are_scaled_down() -> None:
    made = accounts(Tenant("a", 9, share=1.0), Tenant("b", 9, share=0.6), Tenant("c", 9))
    assert [account.share for account in made.known.values()] == pytest.approx([0.625, 0.375, 0.0])


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_part(share: float) -> None:
    with pytest.raises(InvalidValueError, match="part of device time"):
        Tenant("a", 9, share=share)


@pytest.mark.parametrize("rate", [-1.0, 0.0, float("inf")])
def test_a_rate_is_a_positive_number(rate: float) -> None:
    with pytest.raises(InvalidValueError, match="positive number of queries a second"):
        Tenant("a", 9, rate=rate)


def test_queries_count_for_what_they_take_as_they_are_merged() -> None:
    """Of two halves of a lane one serves queries of 10 ms, each within as long as the device ends it in 100 ms: five
    that run one by one, ten when four run for the work of two."""
    for part, within in ((1.0, 5), (0.5, 10)):
        made = accounts(Tenant("a", 100), Tenant("b", 100), lanes=1)
        four = [query(number, "a", 0, 100) for number in range(4)]
        for _ in range(128):
            made.begin("a", four, part)
        made.begin("gone", four, part)
        for number in range(12):
            made.enter(query(number, "a", 0, 100), 10, 0)
        assert len(made.known["a"].deadlines_ns) == within
        assert made.known["a"].demand_ns == pytest.approx(120 * part)


def test_a_rate_goes_before_shares_and_leaves_them_the_rest() -> None:
    """Ten queries a second of 60 ms are 0.6 of the two lanes; the shares are halves of the other 1.4."""
    made = accounts(Tenant("a", 9, rate=10.0), Tenant("b", 9), row=60_000_000)
    a, b = made.known.values()
    assert a.quota == b.quota == 0.7
    made.set_quotas([Tenant("a", 9, rate=10.0), Tenant("b", 9)], 2, lambda tenant: 150_000_000, 0)
    assert a.quota == 1.5
    assert b.quota == pytest.approx(0.25)
    made.set_quotas([Tenant("b", 9)], 2, lambda tenant: 150_000_000, 0)
    assert b.quota == 2.0


def test_as_much_is_within_as_a_device_of_its_own_would_do_in_time() -> None:
    made = accounts(Tenant("a", 100), Tenant("b", 100))
    for number in range(5):
        made.enter(query(number, "a", 1000, 100), 20, 1000)
    assert dict(made.known["a"].deadlines_ns) == {0: 1020, 1: 1040, 2: 1060, 3: 1080, 4: 1100}
    made.enter(query(5, "a", 1000, 100), 20, 1000)
    made.enter(query(6, "b", 1000, 100), 20, 1000)
    assert 5 not in made.known["a"].deadlines_ns
    assert made.known["b"].deadlines_ns == {6: 1020}
    made.enter(query(7, "a", 1020, 100), 20, 1020)
    assert made.known["a"].deadlines_ns[7] == 1120


def test_one_query_at_least_is_within_whatever_the_share() -> None:
    made = accounts(Tenant("a", 100, share=0.01), Tenant("b", 100, share=0.99), lanes=1)
    made.enter(query(0, "a", 0, 100), 50, 0)
    made.enter(query(1, "a", 10, 100), 50, 10)
    assert made.known["a"].deadlines_ns == {0: 100}


def test_what_has_ended_is_forgotten() -> None:
    made = accounts(Tenant("a", 100))
    first = query(0, "a", 0, 100)
    made.enter(first, 10, 0)
    made.leave(first, Outcome.DROPPED)
    assert not made.known["a"].deadlines_ns
    assert not made.known["a"].even_deadlines_ns
    assert made.known["a"].attainment == 0.5


def test_what_clients_withdraw_and_what_fails_is_no_loss_of_attainment() -> None:
    made = accounts(Tenant("a", 100))
    for outcome in (Outcome.CANCELLED, Outcome.FAILED):
        made.leave(query(0, "a", 0, 100), outcome)
    assert made.known["a"].attainment == 1.0


def test_an_answer_beyond_the_share_stands_for_a_later_one_within_it() -> None:
    made = accounts(Tenant("a", 100), Tenant("b", 100))
    beyond, within = made.known["a"].deadlines_ns, list[bool]()
    for number in range(12):
        made.enter(query(number, "a", 0, 100), 20, 0)
    assert sorted(beyond) == [0, 1, 2, 3, 4]
    for number in range(12):
        made.leave(query(number, "a", 0, 100), Outcome.ANSWERED)
    for number in range(20, 32):  # one by one: each is within, and seven were had already
        each = query(number, "a", number * 1000, 100)
        made.enter(each, 20, number * 1000)
        within.append(number in beyond)
        made.leave(each, Outcome.DROPPED)
    assert within == [False] * 7 + [True] * 5


def test_what_stands_for_later_ones_is_bounded() -> None:
    made = accounts(Tenant("a", 100), Tenant("b", 100))
    for number in range(60):
        made.enter(query(number, "a", 0, 100), 20, 0)
    for number in range(60):
        made.leave(query(number, "a", 0, 100), Outcome.ANSWERED)
    owed = 0
    for number in range(100, 120):
        made.enter(query(number, "a", number * 1000, 100), 20, number * 1000)
        owed += number in made.known["a"].deadlines_ns
    assert owed == 20 - 8


def test_what_is_asked_for_is_told_in_lanes() -> None:
    made = accounts(Tenant("a", 100), Tenant("b", 100), Tenant("c", 100))
    for number in range(4000):
        now = 7 * 10**12 + number * 10_000_000
        made.enter(query(number, "ab"[number % 2], now, 100), [6_000_000, 24_000_000][number % 2], now)
    found = {name: account.demand for name, account in made.known.items()}
    assert found == pytest.approx({"a": 0.3, "b": 1.2, "c": 0.0}, rel=0.03)
    made.enter(query(9999, "a", now + 10**10, 100), 6_000_000, now + 10**10)
    assert made.known["b"].demand == pytest.approx(1.2 / 2.718, rel=0.05)


def test_who_stays_keeps_his_account_and_who_comes_owes_nothing() -> None:
    made = accounts(Tenant("a", 100))
    made.leave(query(0, "a", 0, 100), Outcome.DROPPED)
    made.set_quotas([Tenant("a", 100), Tenant("b", 100)], 1, lambda tenant: 1, 5)
    assert made.known["a"].attainment == 0.5
    assert made.known["b"].attainment == 1.0
    made.enter(query(1, "b", 5, 100), 10, 5)
    assert made.known["b"].deadlines_ns == {1: 25}


@SOME
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 25)), min_size=1, max_size=60))
def test_all_that_is_within_can_be_done_when_due(arrivals: list[tuple[int, int, int]]) -> None:
    """On one lane that may stop at any time, by the earliest due time, but for a query longer than its tenant's due."""
    made = accounts(*[Tenant(name, 200) for name in "abc"], lanes=1)
    now, waiting = 0, list[tuple[int, int, int]]()

    def run_until(end: int) -> None:
        at = now
        while waiting and at < end:
            waiting.sort()
            due, number, left = waiting.pop(0)
            done = min(left, end - at)
            at += done
            assert at <= due + len(arrivals), "rounding to whole numbers, at most one for each"
            if left > done:
                waiting.append((due, number, left - done))

    for number, (tenant, gap, work) in enumerate(arrivals):
        run_until(now + gap)
        now += gap
        name = "abc"[tenant]
        made.enter(query(number, name, now, 200), work, now)
        due = made.known[name].deadlines_ns.get(number)
        if due is not None:
            waiting.append((due, number, work))
    run_until(1 << 40)


def test_memory_does_not_grow_with_time() -> None:
    made = accounts(Tenant("a", 100), Tenant("b", 100))
    for number in range(3000):
        each = query(number, "ab"[number % 2], number * 10**9, 100)
        made.enter(each, 10, number * 10**9)
        made.leave(each, Outcome.ANSWERED)
    assert all(account.demand_ns < 1e105 for account in made.known.values())
    assert all(account.attainment > 0.99 and not account.deadlines_ns for account in made.known.values())
