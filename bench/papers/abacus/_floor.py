"""How near any monotone function can come to a world that is not monotone itself: a linear programme."""

from __future__ import annotations

from itertools import product

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import linprog

from bench.papers.abacus._a100 import A100, BATCHES
from cotenant.core.predictor import Group, Member
from cotenant.work import Work

_POINTS = 5
"""Starts of the leader, and cuts of the other member, on the grid of a pair."""


def monotone_floor(world: A100, pair: tuple[str, str]) -> tuple[float, list[Group]]:
    """Least mean relative error, in per cent, of functions that never fall with units or rows; and its grid of groups.

    The first model of the pair runs from one of a few units to its end. The other runs between any two of a few units.
    Both run at all batches. Isotonic regression for the relative L1 norm: minimise sum |f - y| / y subject to f(a) <=
    f(b) for all neighbours a below b. Exact, whatever form the function has.
    """
    lead, other = world.operators(pair[0]), world.operators(pair[1])
    starts = sorted({round(at) for at in np.linspace(0, lead - 1, _POINTS)}, reverse=True)
    cuts = sorted({round(at) for at in np.linspace(0, other, _POINTS)})
    at: dict[tuple[int, int, int, int, int], int] = {}
    groups: list[Group] = []
    for s, b, u, v, c in product(range(len(starts)), range(4), range(len(cuts)), range(len(cuts)), range(4)):
        if u < v:
            at[s, b, u, v, c] = len(groups)
            first = Member(Work(pair[0], 0, BATCHES[b], starts[s], lead), 1)
            groups.append((first, Member(Work(pair[1], 0, BATCHES[c], cuts[u], cuts[v]), 1)))
    truth = world.latencies_ms(groups)
    below, above = [], []
    for (s, b, u, v, c), number in at.items():
        for more in (
            (s + 1, b, u, v, c),
            (s, b + 1, u, v, c),
            (s, b, u - 1, v, c),
            (s, b, u, v + 1, c),
            (s, b, u, v, c + 1),
        ):
            if more in at:
                below.append(number)
                above.append(at[more])
    count, orders = len(groups), len(below)
    lines = np.arange(orders)
    order = sparse.csr_matrix(
        (np.r_[np.ones(orders), -np.ones(orders)], (np.r_[lines, lines], np.r_[below, above])), (orders, 3 * count)
    )
    unit = sparse.identity(count)
    cost = np.r_[np.zeros(count), 1 / truth, 1 / truth] / count
    found = linprog(
        cost,
        A_ub=order,
        b_ub=np.zeros(orders),
        A_eq=sparse.hstack([unit, -unit, unit]).tocsr(),
        b_eq=truth,
        method="highs",
    )
    return float(100 * found.fun), groups
