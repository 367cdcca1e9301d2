"""The virtual clock of quotas beside an oracle in exact fractions: random histories of queries, ends and quotas."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from random import Random

import pytest

from cotenant.core.fair_queues import FairQueues
from cotenant.types import Outcome, Query, Tenant

MS = 1_000_000
MOST = 1 << 62


@dataclass
class Device:
    """A device of some lanes that does the work of one tenant in its order, as a fluid."""

    lanes: Fraction = Fraction(0)
    left: Fraction = Fraction(0)
    now: int = 0
    within: set[int] = field(default_factory=set)

    def pass_to(self, now: int) -> None:
        self.left = max(Fraction(0), self.left - self.lanes * (now - self.now))
        self.now = now

    def enter(self, query: Query, work: int) -> tuple[bool, Fraction]:
        """Whether a query is in quota, and when the device ends it."""
        if not self.lanes:
            return False, Fraction(0)
        end = self.now + (self.left + work) / self.lanes
        if self.left and end > query.deadline_ns:
            return False, end
        self.left += work
        return True, end


def quotas_of(tenants: list[Tenant], lanes: int, row: dict[str, int]) -> dict[str, Fraction]:
    """Lanes of each tenant, as docs/policies.md has it."""
    reserved = {
        each.name: Fraction(each.rate) * row[each.name] / 10**9 for each in tenants if isinstance(each.rate, float)
    }
    total = sum(reserved.values(), Fraction(0))
    scale, left = max(Fraction(1), total / lanes), max(Fraction(0), lanes - total)
    named = sum([Fraction(each.share) for each in tenants], Fraction(0))
    weights = sum([Fraction(each.weight) for each in tenants if not each.share], Fraction(0))
    found = {}
    for each in tenants:
        part = (
            Fraction(each.share) / max(Fraction(1), named)
            if each.share
            else max(Fraction(0), 1 - named) * Fraction(each.weight) / weights
        )
        found[each.name] = max(reserved.get(each.name, Fraction(0)) / scale, part * left)
    return found


def tenant(random: Random, name: str) -> Tenant:
    kind = random.randrange(4)
    return Tenant(
        name,
        100 * MS,
        weight=random.choice([1.0, 0.5, 100.0]),
        share=random.choice([0.01, 0.3, 0.8]) if kind == 0 else 0.0,
        **({"rate": random.choice([0.5, 10.0, 300.0])} if kind == 1 else {}),
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_history_of_clocks_is_that_of_exact_devices(seed: int) -> None:
    """Queries of random work and room; now and then tenants come and go, lanes and prices change. Who is in quota, and
    when it is due, is as exact devices say, but for ties closer than floating point."""
    random, now, number = Random(seed), random_start(seed), 0
    tenants = [tenant(random, name) for name in "abc"[: random.randint(1, 3)]]
    lanes, row = random.randint(1, 4), dict.fromkeys("abcdef", 10 * MS)
    accounts, devices = FairQueues(), dict[str, Device]()
    live, within = list[Query](), 0

    def deal() -> None:
        accounts.set_quotas(tenants, lanes, lambda each: row[each.name], now)
        names = {each.name for each in tenants}
        for name in [*devices]:
            devices[name].pass_to(now)
            if name not in names:
                del devices[name]
        for name, quota in quotas_of(tenants, lanes, row).items():
            devices.setdefault(name, Device(now=now)).lanes = quota
            assert accounts.known[name].quota == pytest.approx(float(quota), rel=1e-9)

    deal()
    for _ in range(250):
        now += random.choice([0, 1, 999, 3 * MS, random.randrange(60 * MS)])
        if random.random() < 0.05:
            what = random.randrange(4)
            if what == 0 and len(tenants) < 6:
                free = [name for name in "abcdef" if name not in accounts.known]
                tenants.append(tenant(random, random.choice(free)))
            elif what == 1 and len(tenants) > 1:
                tenants.remove(random.choice(tenants))
            elif what == 2:
                lanes = random.randint(1, 4)
            else:
                row[random.choice(tenants).name] = random.randint(1, 80) * MS
            deal()
            continue
        name = random.choice(tenants).name
        query = Query(number, name, now, now + random.choice([5 * MS, 100 * MS, 10**10]))
        number += 1
        work = random.choice([1, random.randrange(40 * MS), 300 * MS])
        device, account = devices[name], accounts.known[name]
        device.pass_to(now)
        is_tie = device.left and abs(float(device.left) - 1e-3) < 1e-2
        is_in, end = device.enter(query, work)
        accounts.enter(query, work, now)
        is_tie = is_tie or abs(float(end - query.deadline_ns)) < 1e-3
        if is_tie:  # begin anew where both agree
            accounts, devices = FairQueues(), {}
            deal()
            live = []
            continue
        assert (query.id in account.deadlines_ns) is is_in
        if is_in:
            within += 1
            due = min(end, Fraction(query.deadline_ns))
            assert (
                float(due) - 2 <= account.deadlines_ns[query.id] <= query.deadline_ns
            )  # later by what it has to spare
        live.append(query)
        while len(live) > random.randrange(30):
            gone = live.pop(random.randrange(len(live)))
            accounts.leave(gone, Outcome.DROPPED)  # never in time: no answer stands for another
            assert gone.tenant not in accounts.known or gone.id not in accounts.known[gone.tenant].deadlines_ns
    assert within > 10


def random_start(seed: int) -> int:
    """A clock begins anywhere."""
    return [0, 10**9, 10**15][seed % 3]


def test_a_backlog_runs_off_at_the_quota_of_now() -> None:
    """One query of 100 ms at a hundredth of a lane is ten seconds of backlog, and 100 ms once the lane is its own."""
    crowd = [Tenant(f"t{at}", 100 * MS) for at in range(100)]
    accounts = FairQueues()
    accounts.set_quotas(crowd, 1, lambda each: MS, 0)
    accounts.enter(Query(0, "t0", 0, 100 * MS), 100 * MS, 0)
    accounts.set_quotas(crowd[:1], 1, lambda each: MS, 10 * MS)
    dues = accounts.known["t0"].deadlines_ns
    for number, now, is_in in ((1, 20 * MS, False), (2, 60 * MS, True), (3, 60 * MS, False), (4, 400 * MS, True)):
        accounts.enter(Query(number, "t0", now, now + 60 * MS), 10 * MS, now)
        assert (number in dues) is is_in


@pytest.mark.parametrize("seed", range(20))
def test_no_arrival_changes_a_quota(seed: int) -> None:
    random = Random(seed)
    tenants = [Tenant("a", 100 * MS, rate=80.0), Tenant("b", 100 * MS), Tenant("c", 100 * MS, share=0.2)]
    accounts = FairQueues()
    accounts.set_quotas(tenants, 2, lambda each: 10 * MS, 0)
    before = {name: each.quota for name, each in accounts.known.items()}
    assert before == pytest.approx({"a": 0.8, "b": 0.48, "c": 0.24})
    now = 0
    for number in range(200):
        now += random.randrange(10 * MS)
        query = Query(number, random.choice("abc"), now, now + 100 * MS)
        work = random.randrange(1, 2000) * MS
        if random.random() < 0.3:
            accounts.refused(query, work, now)
        else:
            accounts.enter(query, work, now)
        assert {name: each.quota for name, each in accounts.known.items()} == before


def test_rates_above_the_machine_are_scaled_in_proportion() -> None:
    """Of 2 lanes one rate takes 3 and another one 1."""
    accounts = FairQueues()
    tenants = [Tenant("a", 9, rate=300.0), Tenant("b", 9, rate=100.0), Tenant("c", 9)]
    accounts.set_quotas(tenants, 2, lambda each: 10 * MS, 0)
    assert [each.quota for each in accounts.known.values()] == pytest.approx([1.5, 0.5, 0.0])
    assert accounts.rated_part == 2.0


def test_what_is_refused_for_want_of_room_was_asked_for_and_is_lost() -> None:
    accounts = FairQueues()
    accounts.set_quotas([Tenant("a", 100), Tenant("b", 100)], 2, lambda each: 1, 0)
    a, b = accounts.known.values()
    for number in range(64):
        for name in "ab":
            query = Query(2 * number, name, 0, 100)
            accounts.enter(query, 10, 0)
            accounts.leave(query, Outcome.ANSWERED)
        accounts.refused(Query(2 * number + 1, "a", 0, 100), 10, 0)
    assert a.demand_ns == 2 * b.demand_ns
    assert a.attainment == pytest.approx(0.5, abs=0.05)
    assert b.attainment > 0.95
    assert not a.deadlines_ns
    assert not a.even_deadlines_ns


@pytest.mark.parametrize("seed", range(30))
def test_the_most_urgent_requests_of_a_tenant_have_its_quota(seed: int) -> None:
    """Requests of one work and one deadline, at one instant: as many are in quota, whatever their ranks, and those that
    wait are the first by rank. One that has begun keeps its place."""
    random = Random(seed)
    ranks = [random.randint(1, 4) for _ in range(30)]
    plain, ranked = FairQueues(), FairQueues()
    for made in (plain, ranked):
        made.set_quotas([Tenant("a", 100), Tenant("b", 100)], 1, lambda each: 1, 0)
    begun = set[int]()
    for number, rank in enumerate(ranks):
        plain.enter(Query(number, "a", 0, 100), 5, 0)
        query = Query(number, "a", 0, 100, rank)
        ranked.enter(query, 5, 0)
        if number in ranked.known["a"].deadlines_ns and random.random() < 0.2:
            ranked.begin("a", (query,), 1.0)
            begun.add(number)
    found = set(ranked.known["a"].deadlines_ns)
    assert len(found) == len(plain.known["a"].deadlines_ns) == 10
    assert begun <= found
    waiting = sorted(ranks[number] for number in range(30) if number not in begun)
    assert sorted(ranks[number] for number in found - begun) == waiting[: 10 - len(begun)]
    assert sorted(ranked.known["a"].deadlines_ns.values()) == sorted(plain.known["a"].deadlines_ns.values())
