"""What a request's priority may change: the order inside its own tenant, and nothing for any other one.

Where all requests of a tenant have one priority there is nothing to order: every decision of every policy is the same
as without. That is a law of plug-ins, too.
"""

from __future__ import annotations

from random import Random

import pytest
from msgspec import structs

from cotenant.core.snapshot import Policy
from cotenant.policies.registry import make_policy, policy_class, policy_names
from cotenant.predict.table import TablePredictor
from cotenant.techniques.granularity.joint_plan import JointMember, JointPlan
from cotenant.types import Query, Tenant, priority_rank
from cotenant.work import Round, Share, Slot
from cotenant.world.simulated import TableWorld
from machines import MODELS, TENANTS
from scenario import ONE_LANE, TWO_LANES, Recording, play

NAMES = policy_names()
PREDICTOR = TablePredictor(MODELS)
PLANS = (JointPlan((JointMember("wide", 1, 3), JointMember("quick", 1, 1)), ((3, 0),)),)
ROUNDS = {
    ONE_LANE: (Round(100, (Slot("wide", 4, 2.0, 1, 1), Slot("quick", 2, 5.0, 1, 1), Slot("wide", 2, 1.0))),),
    TWO_LANES: (Round(100, (Slot("wide", 4, 2.0),)), Round(50, (Slot("long", 1, 1.0), Slot("wide", 3, 1.0)))),
}
SELECTING = ("most", "weighted", "fair", "shares")


def offered(random: Random, count: int) -> list[Query]:
    """Queries of all tenants, of which not all can be in time."""
    made, now = [], 0
    for number in range(count):
        now += random.choice([0, 0, 1, 5, 30])
        name = random.choice(sorted(MODELS))
        slo = TENANTS[name].slo_ns
        timeout = random.choice([None, None, None, slo // 2])
        made.append(
            Query(
                number,
                name,
                now,
                now + (timeout or slo),
                items=random.choice([1, 1, 2]),
                expiry_ns=None if timeout is None else now + timeout,
            )
        )
    return made


def told(made: Recording) -> object:
    return made.launches, made.outcomes, made.ended_ns, made.reasons


def played(policy: Policy, tenants: list[Tenant], queries: list[Query]) -> Recording:
    return play(policy, tenants, PREDICTOR, queries, TableWorld(PREDICTOR, noise=0.3, seed=1))


@pytest.mark.parametrize("lanes", [ONE_LANE, TWO_LANES], ids=["one-lane", "two-lanes"])
@pytest.mark.parametrize("name", NAMES)
def test_a_priority_that_all_requests_of_a_tenant_have_changes_nothing(name: str, lanes: tuple[Share, ...]) -> None:
    for seed in range(6):
        random = Random(f"{name} {seed}")
        tenants = [structs_of(each, random.choice([0, 0, 1, 2])) for each in TENANTS.values()]
        plain = offered(random, 60)
        ranks = {each: priority_rank(random.choice([0, 1, 2, 65535])) for each in MODELS}
        ranked = [structs.replace(query, rank=ranks[query.tenant]) for query in plain]
        policies = [make_policy(name, {}, lanes, {"rounds": ROUNDS[lanes], "joint_plans": PLANS}) for _ in range(2)]
        assert told(played(policies[0], tenants, plain)) == told(played(policies[1], tenants, ranked)), seed


def structs_of(tenant: Tenant, priority: int) -> Tenant:
    """The tenant with another priority of its own."""
    fields = tenant.__reduce__()[1]
    names = [*Tenant.__dataclass_fields__]
    return Tenant(**dict(zip(names, fields, strict=True)) | {"priority": priority})


@pytest.mark.parametrize("name", SELECTING)
def test_mixed_priorities_of_one_tenant_cost_no_answer_of_another(name: str) -> None:
    """Of equal queries of a tenant, priorities choose which are served when: never how many, and no other query."""
    policy, tenant = policy_class(name)(TWO_LANES), TENANTS["long"]
    for seed in range(8):
        random = Random(f"{name} {seed}")
        plain = [structs.replace(each, items=1, expiry_ns=None) for each in offered(random, 60)]
        plain = [structs.replace(each, deadline_ns=each.arrival_ns + TENANTS[each.tenant].slo_ns) for each in plain]
        ranked = [
            structs.replace(each, rank=random.randint(1, 3)) if each.tenant == tenant.name else each for each in plain
        ]
        before, after = (played(policy, list(TENANTS.values()), each) for each in (plain, ranked))
        others = [each.id for each in plain if each.tenant != tenant.name]
        lost = sum(before.outcomes[each] == "answered" for each in others)
        kept = sum(after.outcomes[each] == "answered" for each in others)
        assert kept >= 0.9 * lost - 1, seed
