"""Whether groups with a barrier reserve less lane time than independent launches.

With a barrier both lanes of a pair are reserved until its slower member ends; the pair is known. Without one the
partner of a launch is unknown, so each launch reserves its time beside the worst partner. Over all pairs (a, b):

    slowdown(a, b) = max(1, together(a, b) / max(alone(a), alone(b)))

    with_barrier = sum of 2 * together(a, b)

    without = sum of alone(a) * max over c of slowdown(a, c) + alone(b) * max over c of slowdown(b, c)
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from cotenant.policies.facts import LayoutFacts, PairLatency


def reserved_ns(pairs: Mapping[tuple[str, str], PairLatency]) -> tuple[int, int]:
    """Reserved lane time of all pairs, in ns: with a barrier, and without one."""
    worst: dict[str, Fraction] = {}
    for names, pair in pairs.items():
        slowdown = max(Fraction(1), Fraction(pair.together_ns, max(pair.alone_ns)))
        for name in names:
            worst[name] = max(worst.get(name, slowdown), slowdown)
    grouped = sum(2 * pair.together_ns for pair in pairs.values())
    separate = sum(
        alone_ns * worst[name]
        for names, pair in pairs.items()
        for name, alone_ns in zip(names, pair.alone_ns, strict=True)
    )
    return grouped, int(separate)


def needs_barrier(facts: LayoutFacts) -> bool:
    """Whether a barrier reserves less. False without measured pairs, and for one lane."""
    if len(facts.lanes) < 2 or not facts.pairs:
        return False
    grouped, separate = reserved_ns(facts.pairs)
    return grouped < separate
