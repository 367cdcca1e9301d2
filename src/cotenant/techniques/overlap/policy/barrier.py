"""Whether launches have to start and end together: what a barrier reserves of the lanes, and what doing without does.

With a barrier every lane of a group is taken until its last member ends, which is predicted, as everybody is known who
runs beside whom. Without one no lane waits for another, but whoever starts a launch does not know what will start
beside it: to be as sure, the launch has to be given the time that it takes beside the worst partner it may get.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from cotenant.policies.facts import LayoutFacts, PairLatency


def reserved_ns(pairs: Mapping[tuple[str, str], PairLatency]) -> tuple[int, int]:
    """Time of lanes that all pairs together reserve: with a barrier, and without one."""
    worst: dict[str, Fraction] = {}
    for names, pair in pairs.items():
        slowdown = max(Fraction(1), Fraction(pair.together_ns, max(pair.alone_ns)))
        for name in names:
            worst[name] = max(worst.get(name, slowdown), slowdown)
    together = sum(2 * pair.together_ns for pair in pairs.values())
    apart = sum(
        alone_ns * worst[name]
        for names, pair in pairs.items()
        for name, alone_ns in zip(names, pair.alone_ns, strict=True)
    )
    return together, int(apart)


def needs_barrier(facts: LayoutFacts) -> bool:
    """Whether groups reserve less of the lanes than launches on their own; not where nothing was measured, nor for one
    lane."""
    if len(facts.lanes) < 2 or not facts.pairs:
        return False
    together, apart = reserved_ns(facts.pairs)
    return together < apart
