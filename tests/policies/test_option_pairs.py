"""All pairs of policy options, with `max_batch` and layouts of lanes, tried at random: no decision raises or is wrong.

Options and their ranges come from the registry, so that an option that is added is tried from then on.
"""

from __future__ import annotations

from enum import Enum
from itertools import combinations
from random import Random
from typing import Annotated, Any, get_args, get_origin

import pytest
from msgspec import Meta

from cotenant.errors import ConfigError
from cotenant.policies.registry import make_policy, options_of, policy_class, policy_names
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Query, Tenant, priority_rank
from cotenant.work import Round, Share
from cotenant.world.simulated import TableWorld
from scenario import MS, play

LAYOUTS = {
    "one": ((0, 1, 2, 3),),
    "two": ((0, 1), (2, 3)),
    "four": ((0,), (1,), (2,), (3,)),
    "uneven": ((0, 1), (2,), (3,)),
}
MAX_BATCH = (1, 2, 8)
LEAST = 48
"""Runs of each policy at least, beside one for each pair of options."""


def values(kind: Any, rng: Random) -> Any:
    """A value of an option: often one at the end of its range."""
    if get_origin(kind) is Annotated:
        base, *notes = get_args(kind)
        meta = next(note for note in notes if isinstance(note, Meta))
        least = meta.ge if meta.ge is not None else meta.gt if meta.gt is not None else 0
        most = meta.le if meta.le is not None else meta.lt if meta.lt is not None else 8
        few = [least, least + 1, least + 2, least + 4, most] if base is int else [least, (least + most) / 2, most]
        drawn = rng.choice([each for each in few if each <= most])
        if (meta.gt is not None and drawn == least) or (meta.lt is not None and drawn == most):
            drawn = least + 1 if base is int else (least + most) / 2
        return base(drawn)
    if kind is bool:
        return rng.random() < 0.5
    if isinstance(kind, type) and issubclass(kind, Enum):
        return rng.choice([each.value for each in kind])
    if kind is int:
        return rng.choice([1, 2, 4])
    if kind is float:
        return rng.choice([0.1, 0.5, 1.0])
    return None


def offered(rng: Random, tenants: list[Tenant], count: int) -> list[Query]:
    """Queries that leave lanes idle at times and crowd them at others, some of them in time on several lanes alone."""
    made, now = [], 0
    for number in range(count):
        now += rng.choice([0, 0, 1, 3, 30]) * MS
        tenant = rng.choice(tenants)
        deadline = now + round(tenant.slo_ns * rng.choice([0.3, 0.6, 1.0, 1.0]))
        rank = priority_rank(rng.choice([0, 0, 0, 2]))
        made.append(Query(number, tenant.name, now, deadline, rank, rng.choice([1, 1, 2]), 0, rng.choice([0, 0, 1])))
    return made


def world_of(rng: Random, max_batch: int) -> tuple[list[Tenant], TablePredictor]:
    tenants, found = [], {}
    for name in "abc"[: rng.randint(1, 3)]:
        alone, rows = rng.choice([2, 10, 40]) * MS, rng.choice([0.3, 0.6, 1.0])
        gain = rng.choice([0.5, 0.6, 0.9])
        points = []
        for cores, scale in ((1, 1.0), (2, gain), (4, gain * gain)):
            points += [LatencyRow(0, 1, cores, round(alone * scale))]
            points += [LatencyRow(0, 8, cores, round(alone * scale * (1 + 7 * rows)))]
        cuts = rng.choice([(0, 4), (0, 1, 2, 3, 4)])
        # between what one lane and what several take: then it is in time on several alone
        slo = round(alone * rng.choice([0.4, 0.7, 0.95, 1.5, 4.0]))
        tenants.append(Tenant(name, slo, cuts=cuts, max_batch=max_batch, weight=rng.choice([1.0, 1.0, 3.0])))
        found[name] = LatencyTable(tuple(points), (1.0,) * 4)
    return tenants, TablePredictor(found)


@pytest.mark.parametrize("name", policy_names())
def test_no_pair_of_options_makes_a_decision_raise_or_break_the_contract(name: str) -> None:
    options = options_of(policy_class(name))
    pairs: list[tuple[str, ...]] = [*combinations(options, 2)]
    pairs += [tuple(options)] * max(0, LEAST - len(pairs))
    refused = 0
    for number, pair in enumerate(pairs):
        rng = Random(f"{name} {number}")
        drawn = {option: values(options[option], rng) for option in pair}
        lanes = tuple(map(Share, rng.choice(list(LAYOUTS.values()))))
        try:
            given = {option: value for option, value in drawn.items() if value is not None}
            policy = make_policy(name, given, lanes, {"rounds": tuple(Round() for _ in lanes)})
        except ConfigError:  # values that exclude each other, or that these lanes do not allow
            refused += 1
            continue
        for max_batch in MAX_BATCH:
            tenants, predictor = world_of(rng, max_batch)
            play(
                policy, tenants, predictor, offered(rng, tenants, 24), TableWorld(predictor, noise=0.2), cores=range(4)
            )
    assert refused < len(pairs) / 2, "most of the options that were drawn are refused"
