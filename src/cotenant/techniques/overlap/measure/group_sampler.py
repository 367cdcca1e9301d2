"""The choice of groups to measure: random groups that the scheduler can form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from random import Random

from cotenant.core.predictor import Group, Member
from cotenant.errors import InvalidValueError
from cotenant.types import Tenant
from cotenant.work import Work

SOLO_SHARE = 0.1
"""Share of groups with one member: the scheduler launches them when no other query waits."""


FROM_ZERO_SHARE = 1 / 3
"""Share of members that start their model: new queries are more frequent than batches paused at any one cut."""


def sample_groups(
    tenants: Sequence[Tenant],
    sizes: Mapping[str, Sequence[int]],
    lanes: Sequence[int],
    count: int,
    seed: int,
    *,
    shapes: Mapping[str, int] | None = None,
    slots: int = 0,
    repeat: bool = False,
) -> list[Group]:
    """Draw `count` groups that the scheduler can form (Abacus, SC'21, section 5.4: instance-based sampling).

    A group has 1 to `slots` members (0: one a lane), ordered by tenant. Their tenants are distinct, except with
    `repeat`. One member runs to its last unit; each other one is any segment between cuts, since a scheduler cuts only
    the partners of its leader. Batches are drawn from `sizes`, shapes are numbers below `shapes` (default 1). `lanes`
    are cores by lane; each member gets adjacent ones, and no lane is left.

    Raises InvalidValueError when there is no tenant, lane or batch size, or a tenant appears twice.
    """
    names = [tenant.name for tenant in tenants]
    if not tenants or len(set(names)) != len(names):
        raise InvalidValueError("sampling of groups", "tenants", names, "distinct ones, at least one")
    if not lanes or min(lanes) < 1:
        raise InvalidValueError("sampling of groups", "lanes", list(lanes), "the cores of at least one lane")
    for name in names:
        if not sizes.get(name):
            raise InvalidValueError("sampling of groups", "sizes", sizes.get(name), f"batch sizes of {name!r}")
    random = Random(seed)
    most = min(slots or len(lanes), len(lanes), len(lanes) if repeat else len(tenants))
    order = sorted(range(len(tenants)), key=names.__getitem__)
    groups: list[Group] = []
    for _ in range(count):
        size = 1 if most == 1 or random.random() < SOLO_SHARE else random.randint(2, most)
        chosen = sorted(random.choices(order, k=size) if repeat else random.sample(order, size), key=order.index)
        cores = _share_out(lanes, size, random)
        leader = random.randrange(size)
        groups.append(
            tuple(
                _member(tenants[which], sizes, (shapes or {}).get(names[which], 1), share, place == leader, random)
                for place, (which, share) in enumerate(zip(chosen, cores, strict=True))
            )
        )
    return groups


def _member(
    tenant: Tenant, sizes: Mapping[str, Sequence[int]], shapes: int, cores: int, to_end: bool, random: Random
) -> Member:
    cuts = tenant.cuts
    start = 0 if random.random() < FROM_ZERO_SHARE else random.randrange(len(cuts) - 1)
    end = len(cuts) - 1 if to_end else random.randrange(start + 1, len(cuts))
    items = random.choice(sizes[tenant.name])
    return Member(Work(tenant.name, random.randrange(shapes), items, cuts[start], cuts[end]), cores)


def _share_out(lanes: Sequence[int], members: int, random: Random) -> tuple[int, ...]:
    """Cores of each member; all splits into adjacent lanes are equally likely."""
    ways = list(combinations(range(1, len(lanes)), members - 1)) if len(lanes) <= 16 else None
    inner = random.choice(ways) if ways else tuple(sorted(random.sample(range(1, len(lanes)), members - 1)))
    return tuple(sum(lanes[a:b]) for a, b in pairwise((0, *inner, len(lanes))))
